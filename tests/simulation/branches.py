"""python -m tests.simulation.branches [--seeds FROM:TO]: which branches of the protocol's two sides simulated runs
take.

A branch is a way from a line to another one, where a condition or a loop has several. Those that no run has taken are
listed. coverage.py traces each line, so it takes several times as long as without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from coverage import Coverage

PSERVER = Path("trainer/strategies/pserver")
SIDES = {
    "server": (
        "machine",
        "request_queue",
        "answers",
        "members",
        "liveness",
        "parameters",
        "pulls",
        "pushes",
        "rules",
        "checks",
        "lease_requests",
        "epoch_blocks",
        "meetings",
        "saving",
        "shard",
        "sparse_table",
        "admission",
        "changes",
    ),
    "worker": (
        "client",
        "worker",
        "halting",
        "held_blocks",
        "common_start",
        "async_and_ssp",
        "geo",
        "replica",
        "sync",
        "pull",
        "push",
        "ahead",
        "agreement",
        "clipping",
        "silent_servers",
    ),
    "protocol": ("index_intervals",),
}
"""The files with the rules: of each side those that decide something."""
OTHERS = {
    "sockets, clocks and processes, which the simulator has of its own": (
        "server/server",
        "server/part_writer",
        "worker/connections",
        "worker/connections_contract",
        "protocol/sockets",
        "protocol/listener",
        "protocol/shared_memory",
    ),
    "files of a checkpoint, which simulated disks stand for": (
        "server/increments",
        "server/changed_rows",
        "server/ledger",
        "worker/export",
        "protocol/snapshot",
        "protocol/snapshot_parts",
    ),
    "before a run begins, or from a run of another kind": (
        "server/saved_state_checks",
        "server/worker_checkpoint",
        "server/server_assignment",
    ),
    "the form and the place of values, and what is told of them": (
        "worker/initial_values",
        "worker/own_share",
        "worker/remote_model",
        "worker/requests",
        "worker/gauges",
        "protocol/compression",
        "protocol/layout",
        "protocol/messages",
        "protocol/sharding",
    ),
}
"""What the other files have. Each has tests of its own."""


def main() -> int:
    """Play seeds and print a table, as Markdown, and the branches that no run has taken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.branches", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="FROM:TO, TO excluded")
    first, last = (int(n) for n in parser.parse_args().seeds.split(":"))
    files = [str(PSERVER / side / f"{name}.py") for side, names in SIDES.items() for name in names]
    coverage = Coverage(
        branch=True, concurrency=["greenlet", "thread"], data_file=None, include=files, config_file=False
    )
    coverage.start()
    from tests.simulation.seeds import part

    *_, broken = part(range(first, last), None, None)
    coverage.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        coverage.json_report(outfile=str(path))
        told = json.loads(path.read_text())["files"]
    print(f"| file | branches | taken in {last - first:,} runs |\n|---|---|---|")
    for name in files:
        summary = told[name]["summary"]
        print(
            f"| `{name.removeprefix(str(PSERVER) + '/')}` | {summary['num_branches']} | {summary['covered_branches']} |"
        )
    print()
    for name in files:
        lines = Path(name).read_text().splitlines()
        for here, there in told[name]["missing_branches"]:
            where = "the end of the function" if there < 0 else f"{there}: {lines[there - 1].strip()}"
            print(f"{name}:{here}: {lines[here - 1].strip()}\n    never goes to {where}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
