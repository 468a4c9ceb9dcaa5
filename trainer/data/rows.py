"""Reads rows of text as model inputs, for mode=predict and the logged model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass
class Rows:
    """Rows of text after reading: the inputs, and which lines were good.

    Attributes:
        inputs: of the good lines, by name: (G, ...) each.
        good: (N,) which of the N lines these are.
        bad: (number of the line, from 0; what is wrong with it), in order.
    """

    inputs: dict[str, np.ndarray]
    good: np.ndarray
    bad: list[tuple[int, str]]


class RowReader(ABC):
    """Base class that reads rows of text as model inputs. Made of plain data, so that ``model.json`` can name it.

    Importing its module imports neither torch nor mlflow.
    """

    format: ClassVar[str]
    """Description of a row in a few words."""
    example: ClassVar[str]
    """A row without its end of line."""

    @abstractmethod
    def labelled(self, text: bytes) -> bool | None:
        """Whether the rows of a file begin with a label, judged by the first good line; None if no line is good."""

    @abstractmethod
    def read(self, text: bytes, labelled: bool) -> Rows:
        """Read whole lines, each ended by a newline, as inputs. Labels are ignored."""
