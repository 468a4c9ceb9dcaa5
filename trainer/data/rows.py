"""How rows of text from elsewhere become inputs of a model: what mode=predict and the logged model ask of a data source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass
class Rows:
    """Some lines, read.

    Attributes:
        inputs: of the good lines, by name: (G, ...) each.
        good: (N,) which of the N lines these are.
        bad: (number of the line, from 0; what is wrong with it), in order.
    """

    inputs: dict[str, np.ndarray]
    good: np.ndarray
    bad: list[tuple[int, str]]


class RowReader(ABC):
    """Reads rows of text without learning from them. Made of plain data, so that ``model.json`` can say how.

    Importing its module imports neither torch nor mlflow.
    """

    format: ClassVar[str]
    """What a row is, in a few words."""
    example: ClassVar[str]
    """A row without its end of line."""

    @abstractmethod
    def labelled(self, text: bytes) -> bool | None:
        """Whether rows begin with their label, as the first of these whole lines that is a row tells; None: none is."""

    @abstractmethod
    def read(self, text: bytes, labelled: bool) -> Rows:
        """Whole lines, each ended by a newline. Labels are not looked at."""
