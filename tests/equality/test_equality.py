"""docs/equality.md says what is so: its equal and refused cells are made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.equality import page
from tests.equality.cells import EXACT, Ended, difference, handed, one_process, refusal, together
from tests.equality.rows import COLUMNS, ROWS
from tests.strategies.launching import selected
from trainer.cli.compose import folder

CELLS = page.read(ROWS, page.PAGE.read_text())
COLUMN, ROW = {column.name: column for column in COLUMNS}, {row.name: row for row in ROWS}
EQUALS = [key for key, cell in CELLS.items() if cell.kind == "equal" and key[1] in COLUMN]
SLOW = ("ResNet-18, sync batch norm", "ViT")
PLAIN = {
    *("strategy=collective", "strategy=sharded", "strategy=sharded strategy.shard=optimizer", "strategy=pserver_sync"),
    "strategy=local_sgd strategy.k_steps=1",
}
"""Rows of which the large models are trained again here; ``make test-long`` trains them in all."""
CHECKED = [
    pytest.param(*key, marks=pytest.mark.long if key[1] in SLOW and key[0] not in PLAIN else ()) for key in EQUALS
]
REFUSED = [key for key, cell in CELLS.items() if cell.kind == "refused" and key[1] in COLUMN]

ROUNDED = 1e-6
"""The page was made on another machine, which rounds otherwise. What is not equal is off by 1e-3 and more."""

Trained = tuple[Callable[[str, str], Ended], Callable[[str, str], Ended]]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a row came to in a column, or the one process that it is compared with; each group of processes is launched
    once, for the cells that are to run."""
    logs, asked = tmp_path_factory.mktemp("equality"), selected(request, "row", "column")
    equals = [key for key in EQUALS if key in asked]

    @cache
    def launched(servers: int) -> dict[tuple[str, str], Ended]:
        keys = [key for key in equals if ROW[key[0]].servers == servers]
        found = together([handed(COLUMN[name], (*ROW[row].overrides, *EXACT)) for row, name in keys], logs)
        return dict(zip(keys, found, strict=True))

    @cache
    def alone() -> dict[tuple[tuple[str, ...], str], Ended]:
        keys = [*dict.fromkeys((ROW[row].alone, name) for row, name in equals)]
        found = together([handed(COLUMN[name], one_process(COLUMN[name], more, EXACT)) for more, name in keys], logs)
        return dict(zip(keys, found, strict=True))

    return lambda row, column: launched(ROW[row].servers)[row, column], lambda row, column: alone()[
        ROW[row].alone, column
    ]


def test_no_cell_is_empty_and_every_strategy_has_a_row() -> None:
    names = [*COLUMN, page.KILLED, page.OTHER]
    assert CELLS.keys() == {(row, name) for row in ROW for name in names}
    assert all(cell.what for cell in CELLS.values())
    options = {path.stem for path in (folder("conf") / "strategy").glob("*.yaml")} - {"auto", "advise", "single"}
    assert {row.typed[0].removeprefix("strategy=") for row in ROWS} == options


@pytest.mark.all
@pytest.mark.parametrize(("row", "column"), CHECKED)
def test_equal_cells_are_equal(trained: Trained, row: str, column: str) -> None:
    together, alone = trained
    assert difference(together(row, column), alone(row, column)) <= ROUNDED


@pytest.mark.parametrize(("row", "column"), REFUSED)
def test_refused_cells_are_refused_with_that_sentence(row: str, column: str) -> None:
    assert refusal(COLUMN[column], ROW[row]) == CELLS[row, column].what
