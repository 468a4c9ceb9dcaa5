"""Reads the labels of a table's rows: classes by name or number, numbers, or sets of names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

INTEGER = re.compile(r"\s*[+-]?\d{1,18}\s*")
AUTO, CLASS, NUMBER, SET = "auto", "class", "number", "set"
TASKS = {CLASS: "classification", NUMBER: "regression", SET: "multi_label"}
"""Kind of labels -> ``Facts.task``."""


@dataclass(frozen=True)
class LabelKind:
    """The kind of a table's labels.

    Attributes:
        kind: CLASS, NUMBER or SET.
        names: names of the classes or of the members of sets, in the order of their indices; of numbers, names of the
            columns. Classes that are whole numbers have no names.
        separator: between the members of a set.
    """

    kind: str
    names: tuple[str, ...] = ()
    separator: str = ""

    def label(self, values: Sequence[Any]) -> Any:
        """The label of a row, from its value in each label column: a class number, numbers, or 0 and 1 by member.

        Raises:
            ValueError: it is no such label.
        """
        if self.kind == NUMBER:
            numbers = [_finite(value) for value in values]
            return numbers if len(numbers) > 1 else numbers[0]
        (value,) = values
        if self.kind == SET:
            members = set(members_of(value, self.separator))
            return [float(name in members) for name in self.names]
        if self.names:
            return self._number_of[str(value)]
        if int(value) < 0:
            raise ValueError(f"the class {value} is below 0")
        return int(value)

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def array(self, labels: Sequence[Any]) -> np.ndarray:
        """Labels as a data set holds them: classes (N,) int64; numbers (N,) or (N, K), sets (N, K) float32."""
        return np.array(labels, np.int64 if self.kind == CLASS else np.float32)


def members_of(value: Any, separator: str) -> list[str]:
    """The members of a set: of ``cat|dog``, or of a list in a Parquet file; an empty text has none."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(separator)
    return [name for part in parts if (name := str(part).strip())]


def kind_of_labels(values: Iterable[Any], wanted: str, separator: str | None, columns: Sequence[str]) -> LabelKind:
    """Find what labels are: whole numbers and texts are classes, other numbers are numbers.

    Args:
        values: of the label column, of all rows that have one.
        wanted: ``class`` or ``number`` decides; ``auto``: by the values.
        separator: labels are sets of names with this between them; None: they are no sets.
        columns: that hold a label; several hold numbers.
    """
    present = {tuple(value) if isinstance(value, list) else value for value in values}
    if separator:
        members = {name for value in present for name in members_of(value, separator)}
        return LabelKind(SET, tuple(sorted(members)), separator)
    whole = all(isinstance(value, int) or INTEGER.fullmatch(str(value)) for value in present)
    numbers = wanted == AUTO and not whole and all(map(_is_number, present))
    if wanted == NUMBER or numbers or len(columns) > 1:
        return LabelKind(NUMBER, tuple(columns))
    return LabelKind(CLASS) if whole else LabelKind(CLASS, tuple(sorted(map(str, present))))


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the label {value!r} is no number") from error
    if not math.isfinite(number):
        raise ValueError(f"the label {value!r} is not finite")
    return number


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
