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


@dataclass(frozen=True)
class Kill:
    """A run of which a process was killed.

    Attributes:
        victim: its role. commands: how often the same command was typed again. restarts: how often the launcher started all
            processes again; returned: how often one worker. lost_updates: that were done again. lost_s: against a run that nobody kills.
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
    """In Markdown: a row for each strategy and role."""
    rows: defaultdict[tuple[str, str], list[Kill]] = defaultdict(list)
    for kill in kills:
        rows[kill.strategy, kill.victim].append(kill)
    lines = ["| strategy | killed | runs | not needed | worker back | all restarted | resumed | updates done again | time lost, s |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (strategy, victim), them in sorted(rows.items()):
        unharmed = sum(not (k.commands or k.restarts or k.returned) for k in them)
        counts = [sum(getattr(k, name) for k in them) for name in ("returned", "restarts", "commands", "lost_updates")]
        lost = statistics.median(k.lost_s for k in them)
        lines.append(f"| {strategy} | {victim} | {len(them)} | {unharmed} | {' | '.join(map(str, counts))} | {max(0.0, lost):.1f} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Kill(**json.loads(line)) for line in Path(sys.argv[1]).read_text().splitlines()))
