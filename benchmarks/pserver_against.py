"""The present code against a commit: each mode's rate, measured in turn; called by pserver.py.

A tree is measured by its own benchmarks/pserver.py, in processes of its own, with the modes that are named here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODES = {"sync": "pserver_sync", "async": "pserver_async", "ssp": "pserver_ssp", "geo": "pserver_geo"}
ONE = """
import json, sys
import pserver
case = pserver.Case(*json.loads(sys.argv[1]))
[found] = pserver.throughput([case], 1).values()
print(json.dumps([found.rates, found.worker_ms, found.server_ms]))
"""
Found = dict[tuple[str, Path], list[list[float]]]
"""By mode and tree, of each repetition: samples/s per worker, CPU ms a step of a worker, and of the servers."""


def table(commit: str, batch: int, modes: list[str], repetitions: int) -> None:
    """Print what each mode's median rate is of that of the commit."""
    found: Found = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, commit], cwd=ROOT, check=True)
        try:
            for number in range(repetitions):
                for mode in modes:
                    for tree in (before, ROOT) if number % 2 == 0 else (ROOT, before):
                        found[mode, tree].append(_one(tree, MODES[mode], batch))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    shown = Table(title=f"batch {batch}, 2 workers, 1 server, medians of {repetitions} repetitions, {commit} and now")
    for column in (
        "mode",
        "samples/s per worker, before",
        "now",
        "of before",
        "CPU ms a step, worker, before",
        "now",
        "servers, before",
        "now",
    ):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for mode in modes:
        (old, old_worker, old_server), (new, worker, servers) = (_medians(found[mode, tree]) for tree in (before, ROOT))
        shown.add_row(
            mode,
            f"{old:,.0f}",
            f"{new:,.0f}",
            f"{new / old:.3f}",
            f"{old_worker:.1f}",
            f"{worker:.1f}",
            f"{old_server:.2f}",
            f"{servers:.2f}",
        )
    Console(width=140).print(shown)


def _one(tree: Path, strategy: str, batch: int) -> list[float]:
    """One run of a mode in a tree: means over its workers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "benchmarks"), str(tree)])}
    case = json.dumps([strategy, strategy, batch])
    done = subprocess.run(
        [sys.executable, "-c", ONE, case], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{tree}: {strategy} has failed")
    return [statistics.mean(one) for one in json.loads(done.stdout.splitlines()[-1])]


def _medians(repetitions: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*repetitions, strict=True)]
