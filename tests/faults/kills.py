"""python -m tests.faults.kills FILE: what kills of processes have led to, as a table."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "TRAINER_KILLS"
"""The variable that names the file."""
VICTIMS = ("launcher", "worker", "server", "tracking", "another")


@dataclass(frozen=True)
class Kill:
    """A run of which a process was killed.

    Attributes:
        victim: its role. commands: how often the same command was typed again. restarts: how often the launcher started
            all processes again; returned: how often one of them. lost_updates: that were done again. lost_s: against a
            run that nobody kills.
    """

    strategy: str
    victim: str
    commands: int
    restarts: int
    returned: int
    lost_updates: int
    lost_s: float


def leave(kill: Kill) -> None:
    """Add a line to the file."""
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(asdict(kill)) + "\n")


def table(kills: Iterable[Kill]) -> str:
    """In Markdown: a row for each strategy."""
    rows: defaultdict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        rows[kill.strategy].append(kill)
    lines = [
        (
            "| strategy | launcher killed | worker | server | tracking process | another | not needed any more | "
            "one process started again | all started again | command typed again | updates done again | "
            "time lost, s |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for strategy, them in sorted(rows.items()):
        killed = [sum(k.victim == victim for k in them) for victim in VICTIMS]
        harmed = [k.lost_s for k in them if k.commands or k.restarts or k.returned]
        counts = [sum(getattr(k, name) for k in them) for name in ("returned", "restarts", "commands", "lost_updates")]
        lost = f"{max(0.0, statistics.median(harmed)):.1f}" if harmed else "-"
        lines.append(f"| {' | '.join(map(str, [strategy, *killed, len(them) - len(harmed), *counts, lost]))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Kill(**json.loads(line)) for line in Path(sys.argv[1]).read_text().splitlines()))
