"""How a key is declared: default, help, unit, and what it accepts."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(
    default: Any,
    help: str,
    unit: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[Any, ...] = (),
    not_yet: tuple[str, ...] = (),
    texts: bool = False,
    or_auto: bool = False,
    or_range: bool = False,
    or_word: str = "",
    length: int | None = None,
    example: Any = None,
) -> Any:
    """Declare a config key: its default, one line of help, its unit, and the values it accepts.

    Args:
        ge, gt, le, lt: limits of a number, or of each item of a list.
        choices: accepted words; not_yet: words of a later version, refused with a sentence of their own.
        texts: a text or a list of texts.
        or_auto: a whole number (with ``length`` a list of numbers) or ``auto``; annotated as Any, like the next two.
        or_range: a whole number or a range of them, such as 1:4.
        or_word: numbers, or this word.
        length: number of items of a list; None: one or more.
        example: value that is proposed instead of a refused one; None: the default.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "ge": ge,
        "gt": gt,
        "le": le,
        "lt": lt,
        "choices": choices,
        "not_yet": not_yet,
        "texts": texts,
        "or_auto": or_auto,
        "or_range": or_range,
        "or_word": or_word,
        "length": length,
        "example": example,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


AUTO = ("auto", True, False)
LONG = 2**63 - 1
"""The largest number of 64 bits: what torch takes as a seed, and numpy as an id."""
LONGEST_S = 1_000_000
"""Eleven days: no wait is longer. In milliseconds it is a number of 32 bits, which ZeroMQ takes."""
MOST_PROCESSES = 4096
"""On a host."""
MOST_HOSTS = 100_000
WIDEST = 65_536
"""Pixels of a side of an image."""
