"""Makes the cells of docs/equality.md: a training of 20 updates in fp64 by two workers, beside one process."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hydra.errors import ConfigCompositionException

from tests.equality.rows import SHORT, Column, Row
from tests.strategies.launching import composed, start
from trainer.errors import UserError

EXACT = ("precision=fp64", "max_steps=20")
LEARNING = ("precision=fp32", "max_steps=24")
SEEDS = range(5)
EQUAL, CLOSE = 1e-9, 0.05
"""Greatest difference of an element of a parameter, as a share of the way that the parameter's farthest element has
come in the 20 updates."""


@dataclass(frozen=True)
class Cell:
    """What a row came to in a column: its kind, and the number or the sentence behind it."""

    kind: str
    what: str


Ended = dict[str, Any]


def handed(column: Column, overrides: Sequence[str], entry: str = "ended") -> dict[str, Any]:
    """A training of a column, as ``entries.each_case`` wants it.

    Raises:
        UserError: it is refused.
    """
    several = () if "strategy=single" in overrides else column.several
    typed = {override.partition("=")[0]: override for override in (*SHORT, *column.base, *overrides, *several)}
    ready = composed(*typed.values())  # the last of a key
    ready.checked.source.prepare(ready.checked.facts, lambda *_: None)
    return {
        "entry": f"tests.equality.entries:{entry}",
        "payload": copy.deepcopy(ready.assignment.as_dict()),
        "arguments": {},
    }


def together(trainings: list[dict[str, Any]], logs: Path) -> list[Ended]:
    """The trainings one after the other, in one launch."""
    logs.mkdir(parents=True, exist_ok=True)
    return list(start(trainings, logs)["worker"][0]["answers"])


def one_process(column: Column, alone: Sequence[str], more: Sequence[str]) -> list[str]:
    """How the training is typed that a row is compared with."""
    return ["strategy=single", "launch.nproc=1", *alone, *more]


def refusal(column: Column, row: Row) -> str:
    """The sentence that refuses a cell's run; '': none does."""
    try:
        handed(column, (*row.overrides, *EXACT))
    except UserError as error:
        return str(error)
    except ConfigCompositionException:  # what the command line says of it
        strategy = row.typed[0].partition("=")[2]
        return f"{column.several[0]}: strategy={strategy} has no such key"
    return ""


def difference(found: Ended, truth: Ended) -> float:
    """Greatest difference of an element, as a share of its parameter's farthest way; see ``EQUAL``."""
    assert found["end"].keys() == truth["end"].keys()
    shares = [0.0]
    for name, end in truth["end"].items():
        # the same draw; strategy.wire=bf16 and int8 round what workers pull
        np.testing.assert_allclose(found["begin"][name], truth["begin"][name], rtol=0.02, atol=0.01, err_msg=name)
        way = np.abs(end - truth["begin"][name]).max()
        apart = np.abs(found["end"][name] - end).max()
        shares.append(apart / way if way else apart)
    return float(max(shares))


@cache
def _alone(base: tuple[str, ...], alone: tuple[str, ...], logs: Path) -> list[Ended]:
    """The one process: the 20 updates in fp64, and then those of each seed."""
    column = Column("alone", base)
    exact, *seeds = (one_process(column, alone, more) for more in (EXACT, *_seeds()))
    return together([handed(column, exact), *(handed(column, one, "scored") for one in seeds)], logs)


def _seeds() -> list[tuple[str, ...]]:
    return [(*LEARNING, f"seed={seed}") for seed in SEEDS]


def share(apart: float) -> str:
    """A difference as it is shown."""
    return f"{apart:.0e}" if apart else "0"


def exact(column: Column, row: Row, logs: Path) -> Cell:
    """A cell that is refused, equal or close; of kind '' where it is none of these."""
    if sentence := refusal(column, row):
        return Cell("refused", sentence)
    truth = _alone(column.base, row.alone, logs)[0]
    [found] = together([handed(column, (*row.overrides, *EXACT))], logs)
    apart = difference(found, truth)
    return Cell("equal" if apart <= EQUAL else "close" if apart <= CLOSE else "", share(apart))


def statistical(column: Column, row: Row, logs: Path) -> Cell:
    """The score of five seeds, beside that of one process."""
    ended = together([handed(column, (*row.overrides, *more), "scored") for more in _seeds()], logs)
    alone, found = (
        [one["validation"][column.score] for one in runs] for runs in (_alone(column.base, row.alone, logs)[1:], ended)
    )
    return Cell("statistical", f"{_spread(found)} : {_spread(alone)}")


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
