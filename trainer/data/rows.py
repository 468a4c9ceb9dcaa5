"""How rows of text from elsewhere become inputs of a model: what mode=predict and the logged model ask of a data source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass
class Rows:
    """Rows of text, read: inputs, and which lines were good.

    Attributes:
        inputs: of the good lines, by name: (G, ...) each.
        good: (N,) which of the N lines these are.
        bad: (number of the line, from 0; what is wrong with it), in order.
    """

    inputs: dict[str, np.ndarray]
    good: np.ndarray
    bad: list[tuple[int, str]]


class RowReader(ABC):
    """Reads rows of text as inputs of a model, without labels. Made of plain data, so that ``model.json`` can name
    it.

    Importing its module imports neither torch nor mlflow.
    """

    format: ClassVar[str]
    """What a row is, in a few words."""
    example: ClassVar[str]
    """A row without its end of line."""

    @abstractmethod
    def labelled(self, text: bytes) -> bool | None:
        """Whether the rows of a file begin with their label, as the first good one of these lines tells; None: none
        is good."""

    @abstractmethod
    def read(self, text: bytes, labelled: bool) -> Rows:
        """Read whole lines, each ended by a newline, as rows. Labels are not looked at."""
