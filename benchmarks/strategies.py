"""``python benchmarks/strategies.py [--updates 8] [--only "NAME;NAME"]``: what an update of each strategy costs.

Each case is a run of two workers on this host (or of one or four), with the same global batch. The table has

- the time of an update: the median of the log's lines without the first,
- memory: the peak of the largest process (torch itself takes about 0.4 GB of it),
- bytes on the wire for each update: what the loopback interface has carried in a run of twice the updates, less that
  of the run, divided by its updates. So the start is not in it. Servers exchange by TCP here.

Without other load on the machine, about twelve minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

COMMON = (
    "+recipe=resnet50_flowers_demo",
    "data.global_batch_size=32",
    "precision=fp32",
    "execution.threads=1",
    "execution.log_every=2",
    "validation=false",
    "checkpoint=none",
    "tracking=none",
    "best.metric=null",
    "device=cpu",
)
TWO, FOUR = ("launch.nproc=2",), ("launch.nproc=4",)
SERVED = (*TWO, "launch.servers=1", "strategy.transport=tcp")
CASES = {
    "single": ("strategy=single",),
    "single, recomputed": ("strategy=single", "recompute=auto"),
    "collective": (*TWO, "strategy=collective"),
    "collective, 4 streams": (*TWO, "strategy=collective", "strategy.comm_streams=4"),
    "collective, bf16": (*TWO, "strategy=collective", "strategy.comm_hook=bf16"),
    "collective, PowerSGD": (
        *(*TWO, "strategy=collective", "strategy.comm_hook=powersgd"),
        "strategy.powersgd.start_step=2",
    ),
    "sharded optimizer": (*TWO, "strategy=sharded", "strategy.shard=optimizer"),
    "collective, DGC": (*TWO, "strategy=collective", "strategy.comm_hook=dgc", "optimizer=momentum"),
    "collective, LARS": (*TWO, "strategy=collective", "optimizer=lars"),
    "collective, LAMB": (*TWO, "strategy=collective", "optimizer=lamb"),
    "collective, Lion": (*TWO, "strategy=collective", "optimizer=lion"),
    "collective, schedule-free": (*TWO, "strategy=collective", "optimizer=schedule_free"),
    "collective, Muon": (*TWO, "strategy=collective", "optimizer=muon"),
    "sharded gradients": (*TWO, "strategy=sharded", "strategy.shard=gradients"),
    "sharded parameters": (*TWO, "strategy=sharded"),
    "sharded, bf16": (*TWO, "strategy=sharded", "strategy.param_dtype=bf16", "strategy.reduce_dtype=bf16"),
    "sharded, recomputed": (*TWO, "strategy=sharded", "recompute=auto"),
    "local_sgd, k=4": (*TWO, "strategy=local_sgd", "strategy.k_steps=4"),
    "local_sgd, adaptive": (*TWO, "strategy=local_sgd", "strategy.adaptive=true"),
    "local_sgd, 4 fragments": (
        *(*TWO, "strategy=local_sgd", "strategy.k_steps=4"),
        *("strategy.streaming.fragments=4", "strategy.streaming.delay=1"),
    ),
    "DiLoCo, k=4, int8": (
        *(*TWO, "strategy=local_sgd", "strategy.k_steps=4", "strategy.exchange=int8"),
        "strategy.outer.momentum=0.9",
    ),
    "4 workers, collective": (*FOUR, "strategy=collective"),
    "4 workers, reduce_group": (*FOUR, "strategy=collective", "strategy.reduce_group=2"),
    "4 workers, sharded": (*FOUR, "strategy=sharded"),
    "4 workers, shard_group": (*FOUR, "strategy=sharded", "strategy.shard_group=2"),
    "pserver_sync": (*SERVED, "strategy=pserver_sync"),
    "pserver_async": (*SERVED, "strategy=pserver_async", "data.work=static"),
    "pserver_geo, k=4": (*SERVED, "strategy=pserver_geo", "strategy.k_steps=4", "data.work=static"),
}
"""Overrides by the name of the row."""
UPDATES = 8
POLLS_S = 0.1


class Row(NamedTuple):
    """Seconds of an update, bytes of memory of the largest worker, and bytes on the wire for each update."""

    update_s: float
    memory: int
    wire: float


def carried() -> int:
    """Bytes that the loopback interface has carried so far."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def peaks(command: subprocess.Popen[str]) -> Iterator[tuple[int, int]]:
    """Process numbers and resident memory of all that a command has started, until it ends."""
    root = psutil.Process(command.pid)
    while command.poll() is None:
        try:
            for process in (root, *root.children(recursive=True)):
                yield process.pid, process.memory_info().rss
        except psutil.Error:  # one has just ended
            pass
        time.sleep(POLLS_S)


def run(overrides: tuple[str, ...], updates: int, folder: Path) -> tuple[list[float], int, int]:
    """Train; returns the seconds of an update by line, the greatest memory of a process, and bytes on the wire."""
    before, most = carried(), dict[int, int]()
    words = [*COMMON, *overrides, f"max_steps={updates}", f"hydra.run.dir={folder}"]
    command = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for number, memory in peaks(command):
        most[number] = max(most.get(number, 0), memory)
    said, _ = command.communicate()
    if command.returncode:
        raise SystemExit(f"{' '.join(words)}\n{said[-2000:]}")
    points = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [p["perf/step_s"] for p in points if "perf/step_s" in p], max(most.values()), carried() - before


def measured(overrides: tuple[str, ...], updates: int) -> Row:
    """Run a case for so many updates, and for twice as many."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, short = run(overrides, updates, Path(folder, "short"))
        seconds, memory, long = run(overrides, 2 * updates, Path(folder, "long"))
    return Row(statistics.median(seconds), memory, max(0.0, (long - short) / updates))


def main() -> None:
    """Print the table, a row when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--only", default="", help="names of rows, with semicolons in between")
    asked = parser.parse_args()
    wanted = {name: CASES[name] for name in CASES if not asked.only or name in asked.only.split(";")}
    print(
        "| strategy | update | memory of the largest process | on the wire per update |\n|---|---|---|---|", flush=True
    )
    for name, overrides in wanted.items():
        row = measured(overrides, asked.updates)
        print(f"| {name} | {row.update_s:.2f} s | {row.memory / 1e6:,.0f} MB | {row.wire / 1e6:.1f} MB |", flush=True)


if __name__ == "__main__":
    main()
