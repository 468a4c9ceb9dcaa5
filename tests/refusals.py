"""Tables of what is typed and how it is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STANDS_FOR = {
    "{file}": str(Path(__file__).with_name("conftest.py")),
    "{long}": "x" * 300,
    "{long number}": "9" * 5000,
    "{v2}": "torchvision.transforms.v2",
}


@dataclass(frozen=True)
class Case:
    """What is typed, what the sentence must say, and what it must tell to type instead."""

    typed: str
    says: tuple[str, ...] = ()
    instead: str = ""


def cases(before: str, *tables: str) -> list[Case]:
    """The cases of tables. A case is a line: ``typed | what is said | what else is said => what to type instead``;
    lines that are indented further go on with the case above them.

    Args:
        before: typed before what each line says.
    """
    found = []
    for line in re.split(r"\n {4}(?=\S)", "".join(table.rstrip() for table in tables))[1:]:
        for short, whole in STANDS_FOR.items():
            line = line.replace(short, whole)
        said, _, instead = re.sub(r"\n +", " | ", line).replace(" | => ", " => ").partition(" => ")
        typed, *says = said.split(" | ")
        found.append(Case(f"{before}{typed}", tuple(says), instead))
    return found
