"""python -m tests.faults.ledger_table FILE: what ledgers show of disturbed runs, as a table."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

FILE = "TRAINER_LEDGERS"
"""The variable that names the file."""
COLUMNS = (
    "runs",
    "dropped",
    "doubled",
    "delayed",
    "reset",
    "worker killed",
    "worker stopped",
    "server stopped",
    "batches",
    "twice",
    "lost",
)


def leave(kind: str, counts: Mapping[str, int]) -> None:
    """Add a line to the file, if one is named."""
    if name := os.environ.get(FILE):
        with Path(name).open("a") as file:
            file.write(json.dumps([kind, {**counts, "runs": 1}]) + "\n")


def table(text: str) -> str:
    """In Markdown: a row for each kind of runs, and one for all."""
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in map(json.loads, text.splitlines()):
        rows[kind].update(counts)
        rows["together"].update(counts)
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind in sorted(rows, key=lambda kind: (kind == "together", kind)):
        lines.append(f"| {kind} | {' | '.join(f'{rows[kind][column]:,}' for column in COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text()))
