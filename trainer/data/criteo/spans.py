"""The spans of Criteo's 13 integers: the reference's, the user's own, or those of the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.criteo.blocks import RowCounts, Split, blocks_of, rows_of
from trainer.data.criteo.parse import DENSE, REFERENCE, Spans
from trainer.data.source import OnProgress
from trainer.errors import UserError
from trainer.wording import some

AUTO = "auto"
KEYS = ("dense_min", "dense_max")
USUAL, RARE = 10.0, 1000.0
"""Numbers are far from their span if a twentieth of them becomes more than the first, or any one more than the second.
Those of Criteo's own seven days stay below: their longest tail is 862 spans."""


def spans_of(dense_min: Sequence[float] | None, dense_max: Sequence[float] | None) -> Spans:
    """The spans between two lists of 13 numbers, which become 0 and 1. None: the reference's."""
    least = REFERENCE.least if dense_min is None else tuple(map(float, dense_min))
    ends = zip(REFERENCE.least, REFERENCE.span, strict=True)
    most = [low + span for low, span in ends] if dense_max is None else list(map(float, dense_max))
    if dense_min is None and dense_max is None:
        return REFERENCE
    return Spans(least, tuple(high - low for low, high in zip(least, most, strict=True)))


def check(dense_min: Any, dense_max: Any) -> None:
    """Refuse values of ``data.dense_min`` and ``data.dense_max`` that are no spans.

    Raises:
        UserError: with the key, and what to type instead.
    """
    for key, value in zip(KEYS, (dense_min, dense_max), strict=True):
        if value is None or value == AUTO:
            continue
        numbers = isinstance(value, (list, tuple)) and len(value) == DENSE
        if not numbers or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and np.isfinite(v) for v in value
        ):
            raise UserError(
                f"data.{key}={value}", f"must be a list of {DENSE} numbers, auto or null", f"data.{key}=auto"
            )
    if AUTO not in (dense_min, dense_max):
        refuse_empty(spans_of(dense_min, dense_max), dense_min, dense_max)


def refuse_empty(spans: Spans, dense_min: Any, dense_max: Any) -> None:
    """Refuse spans whose end is not above their beginning; ``dense_min`` and ``dense_max`` are as typed.

    Raises:
        UserError: with the integers, and what to type instead.
    """
    ends = [
        f"integer {number} from {low:,.15g} to {low + span:,.15g}"
        for number, (low, span) in enumerate(zip(spans.least, spans.span, strict=True), 1)
        if not span > 0
    ]
    if not ends:
        return
    key, value = KEYS[0] if dense_max is None else KEYS[1], dense_min if dense_max is None else dense_max
    of_rows = {AUTO: " (auto: of the training rows)", None: " (null: the reference's)"}
    least, most = (
        f"{key}{of_rows.get(value, '') if not isinstance(value, list) else ''}"
        for key, value in zip(KEYS, (dense_min, dense_max), strict=True)
    )
    raise UserError(
        f"data.{key}={value}",
        f"data.{most} is not more than data.{least}: {some(ends)}",
        "data.dense_min=auto data.dense_max=auto",
    )


def measured(split: Split, most_bad: float, progress: OnProgress) -> dict[str, list[float]]:
    """Read the rows of a split once, and return the least and the greatest value of each integer.

    An integer that is always the same gets the span 1, and one that is always empty the span from 0 to 1.
    """
    least, most = np.full(DENSE, np.inf), np.full(DENSE, -np.inf)
    tally, total, done = RowCounts(), max(1, sum(path.stat().st_size for path in split.files) >> 20), 0
    for block in blocks_of(split.files, 1 << 40):
        for parsed, start in rows_of(block, None, tally):
            rows = parsed.integers[split.rows.chosen(parsed.offsets + start, block.number)]
            least = np.fmin(least, np.fmin.reduce(rows, axis=0, initial=np.inf))
            most = np.fmax(most, np.fmax.reduce(rows, axis=0, initial=-np.inf))
            progress("measuring the spans, MiB", min(total, (done + (start if block.end else 0)) >> 20), total)
        done += block.path.stat().st_size
    tally.check(most_bad)
    least = np.where(np.isfinite(least), least, 0.0)
    wider = np.maximum(least + 1.0, np.nextafter(least, np.inf))  # beyond 2^53 adding 1 changes nothing
    most = np.where(np.isfinite(most) & (most > least), most, wider)
    return dict(zip(KEYS, (least.tolist(), most.tolist()), strict=True))


def outliers(integers: np.ndarray, spans: Spans) -> str:
    """Return a sentence about columns of (N, 13) integers that leave their spans by far; '' if none does."""
    if not len(integers):
        return ""
    scaled = np.abs((integers - np.array(spans.least)) / np.array(spans.span))
    usual = np.array(
        [
            np.quantile(known, 0.95) if len(known) else 0.0
            for column in scaled.T
            for known in [column[~np.isnan(column)]]
        ]
    )
    greatest = np.fmax.reduce(scaled, axis=0, initial=0.0)
    found = np.flatnonzero((usual > USUAL) | (greatest > RARE))
    if not len(found):
        return ""
    values = [integers[:, n][~np.isnan(integers[:, n])] for n in found]
    columns = [
        (
            f"integer {n + 1} is {known.min():.0f} to {known.max():.0f} with the span {spans.least[n]:g} to "
            f"{spans.least[n] + spans.span[n]:g}"
        )
        for n, known in zip(found, values, strict=True)
    ]
    return (
        f"numbers leave their span by far, so the model sees up to {greatest[found].max():.3g}: {some(columns)}; "
        f"data.dense_min=auto data.dense_max=auto measures the spans"
    )
