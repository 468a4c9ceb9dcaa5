"""docs/equality.md: its text, and the cells that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.equality.cells import Cell
from tests.equality.rows import COLUMNS, Row

PAGE = Path(__file__).parents[2] / "docs" / "equality.md"
KILLED, OTHER = "killed and restarted", "goes on with 3 workers"
HEAD = """# See which strategies are equal

    python -m tests.equality          # makes the tables again, in about an hour on two cores

Each row was trained with two workers, and compared with one process (`strategy=single`) that has the same global batch
of 16 samples, the same seed and the same options. The column is the model; its data are small and drawn from a seed.
Servers are two.

| word | what was measured |
|---|---|
| equal | 20 updates in fp64: the greatest difference of an element of a parameter, as a share of the farthest way of \
an element of it. It is at most 1e-9 |
| close | the same, at most 0.05: rounding, or statistics of fewer samples |
| statistical | 24 updates in fp32 with five seeds: mean and standard deviation of val/acc1 (wide_and_deep: val/auc), \
and after the colon those of one process |
| refused | the run ends with exit code 2 before it starts. The sentence with that number is below |
| goes on | the run ends, with other numbers than the undisturbed one |

One process's batch norm sees 16 samples, and a worker's 8. `strategy.sync_batch_norm=true` makes that equal.

"""
KEPT = f"""
## See what a kill changes

LeNet on digits, 20 updates in fp64. *{KILLED}*: worker 1 is killed by SIGKILL in update 11, and the launcher restarts
what has to be restarted. *{OTHER}*: the run is asked to leave in update 11, and is resumed. The number is the greatest
difference from an undisturbed run, as a share of the parameter's greatest element.

"""
CELL = re.compile(r"(equal|close|statistical|refused|goes on) ?(.*)")


def written(cells: Mapping[str, Mapping[str, Cell]], kept: Mapping[str, Mapping[str, Cell]]) -> str:
    """The page.

    Args:
        cells: by row and column. kept: by row, under ``KILLED`` and ``OTHER``.
    """
    sentences: list[str] = []

    def shown(cell: Cell) -> str:
        if cell.kind != "refused":
            return f"{cell.kind} {cell.what}"
        if cell.what not in sentences:
            sentences.append(cell.what)
        return f"refused {sentences.index(cell.what) + 1}"

    def table(names: list[str], of: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
        yield f"| typed | {' | '.join(names)} |"
        yield "|---|" + "---|" * len(names)
        for row, found in of.items():
            yield f"| `{row}` | {' | '.join(shown(found[name]) for name in names)} |"

    tables = ["\n".join(table([c.name for c in COLUMNS], cells)), "\n".join(table([KILLED, OTHER], kept))]
    refusals = "\n".join(f"{number}. {text}" for number, text in enumerate(sentences, 1))
    return f"{HEAD}{tables[0]}\n{KEPT}{tables[1]}\n\n## Read the refusals\n\n{refusals}\n"


def read(rows: tuple[Row, ...], text: str) -> dict[tuple[str, str], Cell]:
    """The cells of the page's tables, by row and column; refusals with their sentences."""
    sentences = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    found, names = {}, []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] == "typed":
            names = cells[1:]
        elif cells[0].strip("`") in {row.name for row in rows}:
            for name, cell in zip(names, cells[1:], strict=True):
                kind, what = CELL.fullmatch(cell).groups()  # type: ignore[union-attr]
                found[cells[0].strip("`"), name] = Cell(kind, sentences[what] if kind == "refused" else what)
    return found
