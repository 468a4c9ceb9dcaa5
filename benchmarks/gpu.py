"""Our loop against hand-written loops on one GPU, same model and data, alternating in one process.

    python benchmarks/gpu.py [--rounds 7] [--only "ResNet-50, bf16"]

Rivals: ``plain`` is the loop that people write (autocast, channels_last, SGD, a pinned batch copied without waiting, a
loss printed every log line; no metrics), fed with batches cut from tensors as ours is; ``resident`` is the same with
one batch that stays on the GPU, which is what the GPU can do at all. Prints samples per second and ratios (ours /
rival, medians over rounds), the greatest memory, and the share of the time that our loop waited for data.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_run import measured
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.instantiate import call_target, locate
from trainer.config.run_config import RunConfig
from trainer.planning.plan import Plan
from trainer.run_folder.report import Report
from trainer.strategies.seat import Seat
from trainer.worker.build import build
from trainer.worker.loop import train_epoch
from trainer.worker.settings import settings

RESNET = [
    "+recipe=resnet50_random",
    "data.batch_size=256",
    "data.batches=40",
    "data.val_batches=1",
    "execution.log_every=20",
]
LENET = ["+recipe=digits_lenet", "data.batch_size=128", "execution.log_every=20"]
CASES = {
    "ResNet-50, bf16": [*RESNET, "strategy=single", "precision=bf16"],
    "ResNet-50, bf16, NCCL": [*RESNET, "strategy=collective", "precision=bf16"],
    "ResNet-50, bf16, compiled": [*RESNET, "strategy=single", "precision=bf16", "compile=true"],
    "ResNet-50, fp16": [*RESNET, "strategy=single", "precision=fp16"],
    "ResNet-50, fp32": [*RESNET, "strategy=single", "precision=fp32", "data.batch_size=128"],
    "LeNet, bf16": [*LENET, "strategy=single", "precision=bf16"],
    "LeNet, fp32": [*LENET, "strategy=single", "precision=fp32"],
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Loop = Callable[[int], int]


def hand_written(config: RunConfig, plan: Plan, seat: Seat, resident: bool) -> Loop:
    """A loop over the same data; returns a function that trains one epoch and counts its samples.

    Args:
        resident: with one batch that stays on the GPU, and no line of the log.
    """
    device, precision = torch.device(seat.device), plan.chosen.precision
    splits = call_target(config.node("data"), "data").open(plan.data.facts)
    memory = torch.channels_last if plan.chosen.channels_last else torch.contiguous_format
    model = call_target(config.model, "model").to(device, memory_format=memory)
    if config.compile:
        model.compile()
    forward = DistributedDataParallel(model, [device]) if plan.strategy.name == "collective" else model
    optimizer = call_target(config.optimizer, "optimizer", list(model.parameters()))
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    loss_function, size, log_every = nn.CrossEntropyLoss(), plan.batches.size, config.execution.log_every
    mean, std = (
        torch.tensor(v or [fill], device=device).view(-1, 1, 1) for v, fill in ((splits.mean, 0.0), (splits.std, 1.0))
    )
    data: Any = splits.train
    read = data.batch if hasattr(data, "batch") else lambda numbers: data.augmented((0, 0), numbers)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def placed(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = images.pin_memory().to(device, non_blocking=True).contiguous(memory_format=memory)
        labels = labels.pin_memory().to(device, non_blocking=True)
        return ((images - mean) / std if splits.mean else images), labels

    def batches(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = np.random.default_rng(number).permutation(plan.data.facts.train_samples)
        for batch in range(len(order) // size):
            if resident:
                kept[:] = kept or [placed(*read(order[:size]))]
                yield kept[0]
            else:
                yield placed(*read(order[batch * size : (batch + 1) * size]))

    def epoch(number: int) -> int:
        forward.train()
        count = 0
        for images, labels in batches(number):
            with torch.autocast(device.type, TYPES.get(precision), enabled=precision in TYPES):
                loss = loss_function(forward(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            count += size
            if not resident and count // size % log_every == 0:
                print(f"epoch {number}, samples {count}: loss {loss.item():.4f}")
        return count

    return epoch


def measure(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """In the worker: alternate epochs of the loops; samples per second of every round, peak memory and data wait of
    ours."""
    config, plan = payload["assignment"].config, payload["assignment"].plan
    with settings(config, plan, seat):
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        run = build(config, plan, seat, strategy, Report(Path(plan.paths.run_dir), 10**9))
        run.schedule = replace(run.schedule, total_steps=10**9)

        def ours(number: int) -> int:
            before = run.progress.samples
            train_epoch(run, number)
            return run.progress.samples - before

        loops: dict[str, Loop] = {"ours": ours} | {
            name: hand_written(config, plan, seat, name == "resident") for name in ("plain", "resident")
        }
        rates: dict[str, list[float]] = {name: [] for name in loops}
        peaks: dict[str, float] = {}
        waited = spent = 0.0
        for number in range(payload["rounds"] + 1):
            for name in (*loops,) if number % 2 else reversed((*loops,)):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held, before, start = torch.cuda.memory_allocated(), run.feed.waited, time.perf_counter()
                samples = loops[name](number)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
                if number:  # the first round warms all up
                    rates[name].append(samples / seconds)
                    if name == "ours":
                        waited, spent = waited + run.feed.waited - before, spent + seconds
        run.feed.close()
        strategy.close()
    return {"rates": rates, "peaks": peaks, "waited": waited / spent, "gpu": torch.cuda.get_device_name()}


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="one case by its name")
    arguments = parser.parse_args()
    print(
        f"{'case':<28} {'ours /s':>9} {'plain /s':>9} {'resident':>9} {'to plain':>9} {'to resident':>11} "
        f"{'peak GiB: ours, plain':>22} {'data wait':>9}"
    )
    for case, overrides in CASES.items():
        if arguments.only not in (None, case):
            continue
        found = measured(
            "gpu", [*overrides, "device=cuda", "launch.nproc=1", "tracking=none"], ["cuda:0"], arguments.rounds
        )
        rates, peaks = found["rates"], found["peaks"]
        middle = {name: statistics.median(values) for name, values in rates.items()}
        to = [
            statistics.median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
            for name in ("plain", "resident")
        ]
        print(
            (
                f"{case:<28} {middle['ours']:>9,.0f} {middle['plain']:>9,.0f} {middle['resident']:>9,.0f} "
                f"{to[0]:>9.3f} {to[1]:>11.3f} {peaks['ours']:>14.2f} {peaks['plain']:>7.2f} "
                f"{found['waited']:>9.1%}"
            ),
            flush=True,
        )
    print(found["gpu"])


if __name__ == "__main__":
    main()
