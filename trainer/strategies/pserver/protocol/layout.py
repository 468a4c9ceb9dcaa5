"""What a model is made of, as workers tell each server: its pieces of dense parameters and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TableSpec:
    """A sparse table as all sides know it: number on the wire (from 1), name, columns, rows (None: any id), fresh rows,
    factor on the learning rate."""

    number: int
    name: str
    dim: int
    rows: int | None
    init: str
    scale: float
    lr: float = 1.0


@dataclass(frozen=True)
class Layout:
    """What the model is made of, seen from one server: dtype, its pieces (name, start, stop) of dense parameters,
    tables, and how the elements of the pieces learn, in their order: (elements, factor on the learning rate, whether
    they decay); none: all alike."""

    dtype: str
    pieces: list[tuple[str, int, int]] = field(default_factory=list)
    tables: list[TableSpec] = field(default_factory=list)
    groups: list[tuple[int, float, bool]] = field(default_factory=list)

    @property
    def dense(self) -> int:
        """Number of elements of this server's dense vector."""
        return sum(stop - start for _, start, stop in self.pieces)

    def plain(self) -> dict[str, Any]:
        """The layout as JSON data."""
        return {
            "dtype": self.dtype,
            "pieces": self.pieces,
            "groups": self.groups,
            "tables": [vars(t) for t in self.tables],
        }

    @classmethod
    def parsed(cls, body: Mapping[str, Any]) -> Layout:
        """The layout from its JSON data."""
        pieces = [(str(n), int(a), int(b)) for n, a, b in body["pieces"]]
        groups = [(int(n), float(lr), bool(decays)) for n, lr, decays in body.get("groups", ())]
        made = cls(str(body["dtype"]), pieces, [TableSpec(**t) for t in body["tables"]], groups)
        if groups and (sum(n for n, _, _ in groups) != made.dense or min(n for n, _, _ in groups) < 1):
            raise ValueError(f"groups of {[n for n, _, _ in groups]} elements for {made.dense}")
        return made
