"""What runs in a worker of ours for benchmarks/gpu.py: our loop beside those of hand, and a count of its waits."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_rivals
import numpy as np
import torch

from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.tensor_tree import Packed
from trainer.config.instantiate import call_target, locate
from trainer.config.run_config import RunConfig
from trainer.data.sets.random_images import POOL, RandomImages
from trainer.data.source import Facts, Splits
from trainer.planning.plan import Plan
from trainer.run_folder.report import Report
from trainer.strategies.seat import Seat
from trainer.worker import loop as loop_module
from trainer.worker import validation
from trainer.worker.build import build
from trainer.worker.loop import train_epoch
from trainer.worker.settings import settings
from trainer.worker.state import save_state
from trainer.worker.training import Training
from trainer.worker.training_log import log_training, read_line


class ByteNoise(RandomImages):
    """data=random_images in bytes, as decoded photographs are, normalised on the device."""

    def open(self, facts: Facts) -> Splits:
        """Return 64 images of noise in turn, in the memory order of a decoder."""
        size = self.options.image_size
        images = torch.randint(0, 256, (POOL, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = torch.randint(facts.classes, (POOL,))
        return Splits(
            _Bytes(images, labels, facts.train_samples),
            _Bytes(images, labels, facts.val_samples),
            mean=(0.5,) * 3,
            std=(0.25,) * 3,
        )


class _Bytes(torch.utils.data.Dataset[Any]):
    def __init__(self, images: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        self.images, self.labels, self.samples = images, labels, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index % POOL], self.labels[index % POOL]

    def augmented(self, draw: tuple[int, int], addresses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.from_numpy(addresses % self.samples % POOL)
        return self.images[chosen], self.labels[chosen]


@contextmanager
def built(seat: Seat, config: RunConfig, plan: Plan) -> Iterator[Training]:
    """Context manager: a run of ours that is ready to train, without an end."""
    with settings(config, plan, seat):
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        run = build(config, plan, seat, strategy, Report(Path(plan.paths.run_dir), 10**9))
        run.schedule = replace(run.schedule, total_steps=10**9)
        try:
            yield run
        finally:
            run.feed.close()
            strategy.close()


def measure(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Alternate epochs of our loop and of the rivals that the payload names (``plain``, ``strong``, ``resident``).

    Returns:
        ``rates``: samples per second of every round. ``peaks``: GiB. ``waited``: share of the time that our loop waited
        for data. ``precision``: the plan's.
    """
    config, plan = payload["assignment"].config, payload["assignment"].plan
    with built(seat, config, plan) as run:
        epochs = count()

        def ours() -> int:
            before = run.progress.samples
            train_epoch(run, next(epochs))
            return run.progress.samples - before

        loops: dict[str, gpu_rivals.Loop] = {"ours": ours}
        if payload["rivals"]:
            shape, size = plan.data.facts.shape, plan.batches.size
            rival = gpu_rivals.Training(
                lambda: call_target(config.model, "model"),
                torch.device(seat.device),
                plan.chosen.precision,
                size,
                plan.data.facts.train_samples // size,
                shape[-1],
                plan.data.facts.classes,
                plan.chosen.channels_last,
                bool(config.compile),
                ddp=plan.strategy.name == "collective",
                channels=shape[0],
            )
            loops |= {name: getattr(gpu_rivals, name)(rival) for name in payload["rivals"]}
        return {**alternate(loops, payload["rounds"], lambda: run.feed.waited), "precision": plan.chosen.precision}


def alternate(
    loops: dict[str, gpu_rivals.Loop], rounds: int, waited: Callable[[], float] = lambda: 0.0
) -> dict[str, Any]:
    """Run the loops in turn; the first round warms all up."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    peaks: dict[str, float] = {}
    waits = spent = 0.0
    for number in range(rounds + 1):
        for name in (*loops,) if number % 2 else reversed((*loops,)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, before, start = torch.cuda.memory_allocated(), waited(), time.perf_counter()
            samples = loops[name]()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
            if number:
                rates[name].append(samples / seconds)
                if name == "ours":
                    waits, spent = waits + waited() - before, spent + seconds
    return {"rates": rates, "peaks": peaks, "waited": waits / spent if spent else 0.0}


def median(values: list[float]) -> float:
    """Return the median rate; 0.0 of none."""
    return statistics.median(values) if values else 0.0


def count_waits(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Count how often the host waits for the GPU, by torch's own debug mode and by events, streams and devices.

    Returns:
        For each phase (``update``, ``line``, ``validation``, ``checkpoint``) ``[times, waits]``.
    """
    config, plan = payload["assignment"].config, payload["assignment"].plan
    waits, times = Counter[str](), Counter[str]()
    phases = ["start"]

    @contextmanager
    def phase(name: str, often: int = 1) -> Iterator[None]:
        phases.append(name)
        times[name] += often
        try:
            yield
        finally:
            phases.pop()

    def counted(call: Any, name: str | None = None) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            if name is not None:
                with phase(name):
                    return call(*args, **kwargs)
            if not _done(args):
                waits[phases[-1]] += 1
            return call(*args, **kwargs)

        return inner

    def warned(message: Any, *rest: Any, **kwargs: Any) -> None:
        waits[phases[-1]] += "synchroniz" in str(message)

    with built(seat, config, plan) as run, ExitStack() as stack:
        for place, attribute in (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        ):
            stack.enter_context(patch.object(place, attribute, counted(getattr(place, attribute))))
        stack.enter_context(patch.object(loop_module, "log_training", counted(log_training, "line")))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(patch.object(warnings, "showwarning", warned))
        updates = run.feed.updates
        run.feed.updates = lambda epoch, first=0: islice(updates(epoch, first), 2)  # type: ignore[method-assign]
        train_epoch(run, 0)  # warms up: kernels are chosen, memory is got
        read_line(run)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.feed.updates = lambda epoch, first=0: islice(updates(epoch, first), payload["updates"])  # type: ignore[method-assign]
            with phase("update", payload["updates"]):
                train_epoch(run, 0)
                read_line(run)
            with phase("validation", 1 if run.watchers.ema is None else 2):  # that of the average, too
                validation.validate(run)
            with phase("checkpoint"):
                Packed(vars(save_state(run, run.strategy.save(Path(plan.paths.run_dir)), 0, True)), PinnedMemory())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {name: [often, waits[name]] for name, often in times.items()}


def _done(args: tuple[Any, ...]) -> bool:
    """Whether an event that is waited for is there."""
    return bool(args) and isinstance(args[0], torch.cuda.Event) and args[0].query()
