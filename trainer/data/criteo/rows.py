"""Reads Criteo's rows, with or without a label, for mode=predict and for the logged model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.criteo.parse import FIELDS, parse
from trainer.data.criteo.spans import spans_of
from trainer.data.rows import RowReader, Rows


class CriteoRowReader(RowReader):
    """Reads click rows of 13 integers and 26 tokens, with or without a label, for mode=predict and the logged model.

    Args:
        hash_size: ids are below it; None: below 2^63.
        dense_min, dense_max: what becomes 0 and 1, of each integer; None: the reference's.
    """

    format = "a label or none, 13 integers and 26 tokens, separated by tabs"
    example = "\t".join([*map(str, range(1, 14)), *(f"{37 * n:08x}" for n in range(1, 27))])

    def __init__(
        self, hash_size: int | None, dense_min: Sequence[float] | None = None, dense_max: Sequence[float] | None = None
    ) -> None:
        self.hash_size = hash_size
        self.spans = spans_of(dense_min, dense_max)

    def labelled(self, text: bytes) -> bool | None:
        symbols = np.frombuffer(text, np.uint8)
        tabs = np.cumsum(symbols == ord("\t"))[symbols == ord("\n")]  # (N,) tabs up to the end of each line
        fields = np.diff(tabs, prepend=0) + 1
        rows = fields[(fields == FIELDS) | (fields == FIELDS - 1)]
        return bool(rows[0] == FIELDS) if len(rows) else None

    def read(self, text: bytes, labelled: bool) -> Rows:
        parsed = parse(text, self.hash_size, "ignored" if labelled else "absent", self.spans)
        good = np.ones(parsed.lines, bool)
        bad = sorted([*parsed.bad, *((line, "an empty line") for line in parsed.blank)])
        good[[line for line, _ in bad]] = False
        return Rows({"dense": parsed.dense, "sparse": parsed.sparse}, good, bad)
