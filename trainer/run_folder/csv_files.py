"""Writes CSV files whose cells may hold other people's text."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from trainer.config import redact
from trainer.host.files import COMMON, PRIVATE, replacing
from trainer.visible import one_line

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters with which a spreadsheet reads a cell as a formula."""
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.ASCII)


def cell(value: Any) -> Any:
    r"""Make a value safe for a CSV cell: a text that a spreadsheet would compute gets an apostrophe; numbers stay.

    Newlines and control characters are spelled out.
    """
    if not isinstance(value, str):
        return value
    quoted = value.startswith(FORMULA) and NUMBER.fullmatch(value) is None
    return ("'" if quoted else "") + one_line(value)


class CsvTable:
    """Writes the rows of a CSV file; each cell is safe (:func:`cell`) and without secrets."""

    def __init__(self, file: IO[str]) -> None:
        self._rows = csv.writer(file)

    def row(self, values: Iterable[Any], name: str | None = None) -> None:
        """Write one row, ``name`` first. In the name only known secrets are hidden, so that rows stay different."""
        shown = [redact.text(value) if isinstance(value, str) else value for value in values]
        if name is not None:
            shown.insert(0, redact.without(name))
        self._rows.writerow([cell(value) for value in shown])


def write(path: Path, rows: Iterable[Iterable[Any]], private: bool = False) -> None:
    """Write a whole CSV file, which replaces the old one when it is complete.

    Args:
        private: for its owner's eyes alone (0600).
    """
    with replacing(path, PRIVATE if private else COMMON) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = CsvTable(file)
        for row in rows:
            table.row(row)
