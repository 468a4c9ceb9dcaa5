"""Our loop against hand-written DDP loops, same model, data and process, alternating.

    python benchmarks/overhead.py [--nproc 1] [--rounds 15]

Two rivals: the shortest DDP loop that people write, with a DataLoader; and the same fed with batches cut from tensors,
as ours is, which nobody writes but which shows the loop alone. Neither measures accuracies, ours does on every sample.
Prints step time ratios (ours / rival, medians over rounds; at most 1.03 is the aim) and where our step goes.
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
from torch.utils.data import DataLoader, DistributedSampler

from trainer.config.instantiate import call_target, locate
from trainer.config.run_config import RunConfig
from trainer.planning.plan import Plan
from trainer.run_folder.report import Due, Report
from trainer.strategies.seat import Seat
from trainer.worker.build import build
from trainer.worker.loop import train_epoch
from trainer.worker.training import Training

PLAIN = ["execution=plain", "precision=fp32", "tracking=none", "strategy=collective"]
CASES = {
    "digits LeNet, batch 32": ["+recipe=digits_lenet", *PLAIN],
    "ResNet-18 at 64 px, batch 16": [
        "+recipe=resnet50_random",
        "model=resnet18",
        "data.image_size=64",
        "data.batch_size=16",
        "data.batches=6",
        *PLAIN,
    ],
}


def hand_written(config: RunConfig, plan: Plan, seat: Seat, loaded: bool) -> Callable[[int], int]:
    """The shortest DDP loop over the same data; returns a function that trains one epoch and counts its steps.

    Args:
        loaded: through a DataLoader; False: cut from tensors.
    """
    splits = call_target(config.node("data"), "data").open(plan.data.facts)
    model = DistributedDataParallel(call_target(config.model, "model"))
    optimizer = call_target(config.optimizer, "optimizer", list(model.parameters()))
    loss_function = nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(splits.train, seat.size, seat.rank, drop_last=True)
    size, log_every = plan.batches.size, config.execution.log_every
    loader = DataLoader(splits.train, size, sampler=sampler, drop_last=True)
    mean, std = (torch.tensor(v).view(-1, 1, 1) if v else None for v in (splits.mean, splits.std))

    def cut() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data: Any = splits.train
        order = np.array(list(sampler))
        for batch in range(len(order) // size):
            numbers = order[batch * size : (batch + 1) * size]
            yield data.batch(numbers) if hasattr(data, "batch") else data.augmented((0, 0), numbers)

    def epoch(number: int) -> int:
        model.train()
        sampler.set_epoch(number)
        for batch, (images, labels) in enumerate(loader if loaded else cut()):
            if mean is not None:
                images = (images - mean) / std
            loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch % log_every == 0:
                print(f"epoch {number}, batch {batch}: loss {loss.item():.4f}")
        return batch + 1

    return epoch


def measure(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """In each worker: alternate epochs of both loops; seconds per step of every round."""
    config, plan = payload["assignment"].config, payload["assignment"].plan
    torch.set_num_threads(int(plan.chosen.threads))
    strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
    report = Report(Path(plan.paths.run_dir) if seat.rank == 0 else None, 10**9)
    run = build(config, plan, seat, strategy, report)
    run.schedule = replace(run.schedule, total_steps=10**9)

    def ours(number: int) -> int:
        before = run.progress.step
        train_epoch(run, number)
        return run.progress.step - before

    loops = {
        "ours": ours,
        "loader": hand_written(config, plan, seat, True),
        "cut": hand_written(config, plan, seat, False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(payload["rounds"] + 1):
        for name in (*loops,) if number % 2 else reversed((*loops,)):
            start = time.perf_counter()
            steps = loops[name](number)
            if number:  # the first round warms both up
                seconds[name].append((time.perf_counter() - start) / steps)
    shares = where_it_goes(run)
    strategy.close()
    return {**seconds, "shares": shares}


def where_it_goes(run: Training) -> dict[str, float]:
    """Seconds per step of our loop's parts, measured apart, over one epoch."""
    spent = dict.fromkeys(("data", "forward", "backward + exchange", "update", "line + point"), 0.0)
    meter, steps = run.task.meter(), 0
    clock = time.perf_counter
    start = clock()
    for samples, batches in run.feed.updates(0):
        for batch in batches:
            data = clock()
            loss, outputs = run.task.forward(run.forward, batch.inputs, batch.labels)
            forward = clock()
            run.strategy.backward(loss)
            backward = clock()
            run.strategy.step(samples)
            update = clock()
            meter.add(loss, outputs, batch.labels, batch.samples)
            steps += 1
            if steps % run.schedule.log_every == 0:
                sums = run.strategy.all_reduce_sum(meter.sums())
                metrics, due = run.task.summary(sums), Due.now(run.feed)
                run.reporting.report.training(0, steps, steps, metrics, sums[-1].item(), 0.0, due)
            end = clock()
            times = (data - start, forward - data, backward - forward, update - backward, end - update)
            for name, more in zip(spent, times, strict=True):
                spent[name] += more
            start = clock()
    return {name: total / steps for name, total in spent.items()}


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{'case':<30} {'workers':>7} {'ours ms':>8} {'DataLoader':>11} {'cut':>6}   our step: part, share")
    for case, overrides in CASES.items():
        results = measured(
            "overhead", [*overrides, f"launch.nproc={arguments.nproc}"], ["cpu"] * arguments.nproc, arguments.rounds
        )
        ratios = [
            statistics.median(a / b for a, b in zip(results["ours"], results[name], strict=True))
            for name in ("loader", "cut")
        ]
        whole = sum(results["shares"].values())
        shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in results["shares"].items())
        ours = statistics.median(results["ours"]) * 1e3
        print(
            f"{case:<30} {arguments.nproc:>7} {ours:>8.3f} {ratios[0]:>11.3f} {ratios[1]:>6.3f}   {shares}", flush=True
        )


if __name__ == "__main__":
    main()
