"""``python -m tests.equality [--new]``: make docs/equality.md again, or the rows alone that it does not have yet."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from tests.equality import page
from tests.equality.cells import Cell, exact, statistical
from tests.equality.kept import after_a_kill
from tests.equality.rows import COLUMNS, ROWS


def main() -> None:
    """Make all cells, say how far it is, and write the page."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    began = time.monotonic()
    before = page.read(ROWS, page.PAGE.read_text()) if "--new" in sys.argv else {}
    cells: dict[str, dict[str, Cell]] = {}
    kept: dict[str, dict[str, Cell]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, row in enumerate(ROWS):
            logs = Path(scratch, "logs")
            if (row.name, page.OTHER) in before:
                cells[row.name] = {column.name: before[row.name, column.name] for column in COLUMNS}
                kept[row.name] = {name: before[row.name, name] for name in (page.KILLED, page.OTHER)}
                continue
            found = {column.name: exact(column, row, logs) for column in COLUMNS}
            found |= {c.name: statistical(c, row, logs) for c in COLUMNS if not found[c.name].kind}
            killed, other = after_a_kill(row, Path(scratch, str(number)))
            cells[row.name], kept[row.name] = found, {page.KILLED: killed, page.OTHER: other}
            done = f"[{number + 1}/{len(ROWS)}, {time.monotonic() - began:.0f} s] {row.name}"
            print(done, *(one.kind for one in (*found.values(), killed, other)), sep=" | ", file=sys.stderr, flush=True)
            page.PAGE.write_text(page.written(cells, kept))  # after an interruption, --new goes on


if __name__ == "__main__":
    main()
