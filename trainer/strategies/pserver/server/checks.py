"""Checks of a message against what this server keeps: anybody with a key of the run may send anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.strategies.pserver.protocol.compression import decode
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Message
from trainer.strategies.pserver.server.shard import Rows, Shard

MOST_WORK = 1 << 16
WORK_COLUMNS = 4
LARGEST_NUMBER = 1 << 53
REFUSED = "strategy.on_nonfinite=refuse"


class NotFinite(Malformed):
    """What a message brings for the parameters is NaN or infinite."""


class Numbers(NamedTuple):
    """The numbers of a PUSH: version, samples, age, merged gradients, denominator.

    Attributes:
        basis: version of the parameters it was computed with (geo: of the last answer).
        samples: behind its gradients. age: what its rows are stamped with. merged: gradients added up in it.
        denominator: of the loss behind them, by which sync weights.
    """

    basis: int
    samples: float
    age: int
    merged: int
    denominator: float


def numbers(message: Message, most_merged: int) -> Numbers:
    """The checked numbers of a PUSH.

    Raises:
        Malformed: they are missing or out of range.
    """
    found = message.need(Kind.NUMBERS)
    if found.dtype != np.float64 or found.ndim != 1:
        raise Malformed("PUSH without its numbers")
    values = found[:5].tolist()
    if len(values) < 3 or not all(map(math.isfinite, values)):
        raise Malformed("PUSH without its numbers")
    basis, samples, age = int(values[0]), float(values[1]), int(values[2])
    if not 0 <= basis < LARGEST_NUMBER or not 0 <= age < LARGEST_NUMBER or not 0 <= samples < LARGEST_NUMBER:
        raise Malformed(f"PUSH with the numbers {basis}, {samples:g}, {age}")
    merged = int(values[3]) if len(values) > 3 else 1
    if not 1 <= merged <= most_merged:
        raise Malformed(f"PUSH of {merged} gradients")
    denominator = float(values[4]) if len(values) > 4 else samples
    if not 0 <= denominator < LARGEST_NUMBER:
        raise Malformed(f"PUSH of a loss that was divided by {denominator:g}")
    return Numbers(basis, samples, age, merged, denominator)


def work(message: Message) -> np.ndarray:
    """The batches of leased blocks that a PUSH covers, (N, 4), checked.

    Raises:
        Malformed: they have another shape.
    """
    found = message.first(Kind.WORK)
    if found is None:
        return np.empty((0, WORK_COLUMNS), dtype=np.int64)
    if found.ndim != 2 or found.shape[1] != WORK_COLUMNS or found.dtype != np.int64 or len(found) > MOST_WORK:
        raise Malformed(f"work of {found.shape}")
    if any(min(row) < 0 or row[2] >= row[3] for row in found.tolist()):
        raise Malformed("work of negative numbers, or of no batches")
    return found


def layout(body: Mapping[str, Any]) -> Layout:
    """The layout in a START, checked.

    Raises:
        NotFinite: a rate, or the scale of fresh rows, with which every value would become NaN or infinite.
    """
    found = Layout.parsed(body)
    factors = [(f"table {t.name}", factor) for t in found.tables for factor in (t.lr, t.scale)]
    for name, factor in [*factors, *((f"the group of {elements} elements", lr) for elements, lr, _ in found.groups)]:
        if not math.isfinite(factor):
            raise NotFinite(f"the rate or scale of {name} is {factor}")
    return found


def norm(message: Message, finite_only: bool) -> float:
    """The norm of a whole gradient in a COMMIT, checked. Clipped by NaN, no gradient would be clipped; by a negative
    norm, the step would go the other way.

    Raises:
        Malformed: it is missing, or negative. NotFinite: it is NaN or infinite, and ``finite_only``.
    """
    found = message.need(Kind.NUMBERS)
    if found.dtype != np.float64 or found.shape != (1,):
        raise Malformed("COMMIT without its norm")
    value = float(found[0])
    if finite_only and not math.isfinite(value):
        raise NotFinite(f"the norm of the gradient is not finite ({REFUSED})")
    if value < 0:
        raise Malformed(f"COMMIT with the norm {value:g}")
    return value


def dense(shard: Shard, message: Message) -> torch.Tensor | None:
    """The values (n,) for the dense vector in a PUSH, checked; None without any.

    Raises:
        Malformed: they are of another length.
    """
    array = message.first(Kind.DENSE)
    if array is None:
        return None
    found = decode(array, message.first(Kind.SCALES, 0), shard.dtype)
    if found.shape != shard.vector.shape:
        raise Malformed(f"{len(found)} dense values for {len(shard.vector)}")
    return found


def rows(shard: Shard, message: Message) -> Rows:
    """The values of rows by table in a PUSH, checked.

    Raises:
        Malformed: ids that are not at home here, or values of another shape.
    """
    found: Rows = {}
    for record in message.records:
        if record.kind != Kind.ROWS:
            continue
        own = ids(shard, record.table, message.need(Kind.IDS, record.table))
        values = decode(record.array, message.first(Kind.SCALES, record.table), shard.dtype)
        if values.shape != (len(own), shard.tables[record.table].dim):
            raise Malformed(f"{tuple(values.shape)} values for {len(own)} rows")
        found[record.table] = own, values
    return found


def ids(shard: Shard, number: int, found: np.ndarray) -> np.ndarray:
    """The ids (U,) of a table in a message: checked to be ascending, not negative, in range and at home in this
    server.

    Raises:
        Malformed: they are not.
    """
    table = shard.tables.get(number)
    if table is None or found.dtype != np.int64 or found.ndim != 1:
        raise Malformed(f"ids of table {number}")
    if not (found[1:] > found[:-1]).all():
        raise Malformed(f"ids of table {table.name} are not ascending")
    if len(found) and found[0] < 0:
        raise Malformed(f"table {table.name} has no row {found[0]}: ids are not negative")
    if len(found) and table.num_rows is not None and found[-1] >= table.num_rows:
        raise Malformed(f"table {table.name} has rows 0..{table.num_rows - 1}, not {found[-1]}")
    if shard.servers > 1 and not shard.owns(number, found).all():
        raise Malformed(f"rows of table {table.name} that another server keeps")
    return found


def finite(shard: Shard, dense: torch.Tensor | None, rows: Rows) -> None:
    """Check the values of a PUSH or START.

    Raises:
        NotFinite: one is NaN or infinite; it names the parameter, or the table and the row.
    """
    if name := nonfinite(shard, dense, rows):
        raise NotFinite(f"values of {name} are not finite ({REFUSED})")


def nonfinite(shard: Shard, dense: torch.Tensor | None, rows: Rows) -> str:
    """Where there is a value that is not finite: the parameter's name, or the table's and the row's; empty:
    nowhere."""
    if dense is not None and not _finite(dense):
        return shard.name_of(int((~torch.isfinite(dense)).nonzero()[0]))
    for number, (ids, values) in rows.items():
        if not _finite(values):
            return f"table {shard.tables[number].name}, row {ids[int((~torch.isfinite(values)).nonzero()[0][0])]}"
    return ""


def _finite(values: torch.Tensor) -> bool:
    """The sum of finite values may overflow; that of others is never finite. It takes a fifth of the time."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
