"""The time of a sweep of trivial jobs, one after the other and side by side, and what a further job costs.

    python benchmarks/parallel_sweep.py [--jobs 100] [--parallel 2] [--mlflow]

Each way is a command of its own. The cost of a further job is the slope between a sweep of few jobs and one of all, so
that the start of the command and of its processes is not counted twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

FEW = 4
JOB = ("+recipe=digits_lenet", "epochs=1", "limit_train_batches=4", "limit_val_batches=1", "execution.threads=1")


def seconds(jobs: int, *words: str) -> float:
    """The wall time of a sweep of so many jobs."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        sweep = [f"seed=range(0,{jobs})", "hydra.sweep.dir=sweep", *words]
        command = [sys.executable, "-m", "trainer", "-m", *JOB, *sweep]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began


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
        few, every = (seconds(jobs, *tracking, *words) for jobs in (FEW, asked.jobs))
        totals.append(every)
        slopes.append((every - few) / (asked.jobs - FEW))
        print(f"{name:<20} {every:6.1f} s for {asked.jobs} jobs, {slopes[-1]:.2f} s for a further one", flush=True)
    print(f"faster: {totals[0] / totals[1]:.2f} times in all, {slopes[0] / slopes[1]:.2f} times for a further job")


if __name__ == "__main__":
    main()
