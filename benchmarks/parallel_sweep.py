"""The time of a sweep of trivial jobs, one after the other and side by side, and what a further job costs.

    python benchmarks/parallel_sweep.py [--jobs 100] [--parallel 2] [--mlflow]

Each way is a command of its own. The cost of a further job is the slope between a sweep of few jobs and one of all, so
that the start of the command and of its processes is not counted twice. Its CPU seconds are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time

FEW = 4
JOB = ("+recipe=digits_lenet", "epochs=1", "limit_train_batches=4", "limit_val_batches=1", "execution.threads=1")


def seconds(jobs: int, *words: str) -> tuple[float, float]:
    """The wall time and the CPU time of a sweep of so many jobs."""
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.monotonic(), _cpu()
        sweep = [f"seed=range(0,{jobs})", "hydra.sweep.dir=sweep", *words]
        command = [sys.executable, "-m", "trainer", "-m", *JOB, *sweep]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the times and their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--mlflow", action="store_true")
    asked = parser.parse_args()
    tracking = [] if asked.mlflow else ["tracking=none"]
    ways = {"one after the other": [], f"sweep.parallel={asked.parallel}": [f"sweep.parallel={asked.parallel}"]}
    totals, slopes = [], []
    for name, words in ways.items():
        (few, few_cpu), (every, cpu) = (seconds(jobs, *tracking, *words) for jobs in (FEW, asked.jobs))
        totals.append(every)
        slopes.append((every - few) / (asked.jobs - FEW))
        further = f"{slopes[-1]:.2f} s ({(cpu - few_cpu) / (asked.jobs - FEW):.2f} of CPU) for a further one"
        print(f"{name:<20} {every:6.1f} s ({cpu:.0f} of CPU) for {asked.jobs} jobs, {further}", flush=True)
    print(f"faster: {totals[0] / totals[1]:.2f} times in all, {slopes[0] / slopes[1]:.2f} times for a further job")


if __name__ == "__main__":
    main()
