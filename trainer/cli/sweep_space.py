"""The space of a search: which values each key may have, from ``sweep.space`` and from swept overrides."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.keys import leaves, spelled
from trainer.errors import UserError
from trainer.wording import override, quoted

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"(?P<log>log\s+)?(?P<low>{NUMBER})\s*\.\.\s*(?P<high>{NUMBER})(?:\s+step\s+(?P<step>{NUMBER}))?")
WHOLE = re.compile(r"[-+]?\d+")
EXAMPLE = "'sweep.space={optimizer.lr: log 1e-4..1, data.batch_size: [16,32,64], epochs: 1..9 step 2}'"
"""As a shell and Hydra take it."""
MOST_OF_GRID = 10_000
"""Combinations of a grid."""


@dataclass(frozen=True)
class Choice:
    """A key that has one of some values, as they are typed."""

    key: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, str]:
        """The first and the last value."""
        return self.values[0], self.values[-1]

    def all(self) -> list[Any]:
        """All values."""
        return list(self.values)

    def __str__(self) -> str:
        return ",".join(self.values)


@dataclass(frozen=True)
class Interval:
    """A key with a number from ``low`` to ``high``, both included.

    Attributes:
        whole: whole numbers. log: drawn evenly on a logarithmic scale. step: from one value to the next; None: any.
    """

    key: str
    low: float
    high: float
    whole: bool = False
    log: bool = False
    step: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        return self.low, self.high

    def all(self) -> list[Any]:
        """All values.

        Raises:
            UserError: there is no end of them.
        """
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            raise UserError(
                f"sweep.sampler=grid with {self.key}",
                "has a range without steps, of which a grid has no end of values",
                f"sweep.sampler=tpe, or {space_of(self.key, f'[{self.low:g},{self.high:g}]')}",
            )
        return [round(self.low + n * step, 12) for n in range(int((self.high - self.low) / step + 1e-9) + 1)]

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step:g}"
        return f"{'log ' * self.log}{self.low:g}..{self.high:g}{step}"


Dimension = Choice | Interval


def space_of(key: str, values: str) -> str:
    """What to type for a space of one key, as a shell and Hydra take it."""
    return quoted(f"sweep.space={{{key}: {values}}}")


def parse(key: str, value: Any) -> Dimension:
    """Read the values of one key of ``sweep.space``.

    Raises:
        UserError: they are no list and no range.
    """
    what = f"sweep.space={{{key}: {spelled(value)}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise UserError(what, "is a list without values", EXAMPLE)
        return Choice(key, tuple(dict.fromkeys(_typed(key, one) for one in value)))
    found = RANGE.fullmatch(str(value).strip())
    if found is None:
        raise UserError(what, "is neither a list of values nor a range such as 0.1..0.9 or log 1e-4..1", EXAMPLE)
    low, high, step = (found[name] for name in ("low", "high", "step"))
    whole = all(WHOLE.fullmatch(one) for one in (low, high, step or "1"))
    number = int if whole else float
    return checked(
        Interval(key, number(low), number(high), whole, bool(found["log"]), number(step) if step else None), what
    )


def _typed(key: str, value: Any) -> str:
    """A value of a list as it is typed after ``key=``."""
    return override(key, value).partition("=")[2] if isinstance(value, str) else spelled(value)


def checked(one: Interval, what: str) -> Interval:
    """Refuse a range that has no values.

    Raises:
        UserError: its ends, its scale or its step are impossible.
    """
    if not (math.isfinite(one.low) and math.isfinite(one.high) and one.low < one.high):
        raise UserError(what, "has to begin below its end", space_of(one.key, "1..9" if one.whole else "0.1..0.9"))
    if one.log and one.low <= 0:
        why = "begins at zero or below, where a logarithmic scale has no values"
        raise UserError(what, why, space_of(one.key, "log 1..64" if one.whole else "log 1e-4..1"))
    if one.step is not None and (one.log or one.step <= 0):
        steps = "1..9 step 2" if one.whole else "0.1..0.9 step 0.1"
        raise UserError(what, "a step is above zero, and is for ranges without log", space_of(one.key, steps))
    return one


def of_override(typed: Override) -> Dimension:
    """Read the values of a swept override: ``a,b``, ``choice(...)``, ``range(...)``, ``interval(...)``, with ``int``,
    ``float`` and ``tag(log, ...)``.

    Raises:
        UserError: the values cannot be searched.
    """
    from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep

    key, values, what = str(typed.key_or_group), typed.value(), str(typed.input_line)
    if isinstance(values, IntervalSweep):
        low, high = float(values.start or 0), float(values.end or 0)
        whole = isinstance(values.start, int) and isinstance(values.end, int) and "int" in what
        number = int if whole else float
        return checked(Interval(key, number(low), number(high), whole, "log" in values.tags), what)
    if isinstance(values, (ChoiceSweep, RangeSweep)):
        return Choice(key, tuple(dict.fromkeys(str(one) for one in typed.sweep_string_iterator())))
    raise UserError(what, "is a pattern, of which a search does not know the values", f"'{key}=choice(A,B)'")


def of_search(space: Any, typed: Sequence[Override]) -> list[Dimension]:
    """The space of a search: the keys of ``sweep.space``, and those of swept overrides.

    Raises:
        UserError: it is empty, or a key is there twice.
    """
    if not isinstance(space, Mapping):
        raise UserError(f"sweep.space={spelled(space)}", "is no mapping from keys to their values", EXAMPLE)
    found = [parse(key, value) for key, value in leaves(space, "")]
    found += [of_override(one) for one in typed if one.is_sweep_override()]
    keys = [one.key for one in found]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(twice, "has its values twice", "either in sweep.space, or as an override")
    if not found:
        raise UserError("sweep=optuna", "there is no key with several values to choose from", EXAMPLE)
    return found


def words(values: Mapping[str, Any]) -> list[str]:
    """The overrides for these values, by key."""
    return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]


def grid(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """All combinations of values, the last key first.

    Raises:
        UserError: a key has no end of values, or there are too many.
    """
    count = math.prod(len(one.all()) for one in space)
    if count > MOST_OF_GRID:
        raise UserError("sweep.sampler=grid", f"has {count} combinations", "sweep.sampler=random")
    combined: list[dict[str, Any]] = [{}]
    for one in space:
        combined = [{**before, one.key: value} for before in combined for value in one.all()]
    return combined
