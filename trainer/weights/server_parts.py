"""Reads what parameter servers have saved: one file each, from which the model's parameters are put together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import UserError, why
from trainer.weights.fresh_rows import RowInit, fresh_table

DENSE, TABLE = "dense", "table"
"""Begin the names of tensors: of pieces of dense parameters (``dense|NAME|START``), and of rows (``table|NAME|ids``)."""


@dataclass(frozen=True)
class TableFacts:
    """What a server's file tells of a table: its columns, dtype, sparse rule, rows and initialisation. ``num_rows``:
    None for any id; ``rows``: how many are there."""

    dim: int
    dtype: str
    kernel: str
    num_rows: int | None
    rows: int
    init: str
    scale: float
    seed: int

    @property
    def kind(self) -> torch.dtype:
        """The torch dtype of the table's values."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ServerFile:
    """The file of one server; tensors are mapped into memory and read when accessed."""

    server: int
    path: Path

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, framework="pt")  # type: ignore[no-untyped-call]

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The server's metadata, besides its tensors."""
        return dict(json.loads(self._file.metadata()["meta"]))

    @property
    def version(self) -> int:
        """The number of updates that the server had applied."""
        return int(self.meta["version"]) - int(self.meta.get("skipped", 0))

    @property
    def life(self) -> int:
        """The random number of the server's life that wrote the file."""
        return int(self.meta.get("life", 0))

    @property
    def layout(self) -> Mapping[str, Any]:
        """The layout of the model that the server was given, as JSON data; empty in persistables."""
        return dict(self.meta.get("layout", {}))

    @cached_property
    def tables(self) -> dict[str, TableFacts]:
        """The facts of the server's tables, by name."""
        return {name: TableFacts(**told) for name, told in self.meta["tables"].items()}

    def keys(self) -> list[str]:
        """The names of the tensors in this file."""
        return list(self._file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of this file by its name."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensor(name)


Tensors = Mapping[str, torch.Tensor] | ServerFile
Piece = tuple[int, torch.Tensor]
"""Elements (n,) of a parameter, from that one on."""


def part_name(server: int | str) -> str:
    """The name of the file that a parameter server saves."""
    return f"server-{server}.safetensors"


def parts_of(folder: Path) -> list[ServerFile]:
    """The servers' files in a folder that the caller has checked."""
    servers = len(list(folder.glob(part_name("*"))))
    return [ServerFile(server, folder / part_name(server)) for server in range(servers)]


def pieces(parts: Sequence[Tensors]) -> dict[str, dict[str, list[Piece]]]:
    """The pieces that servers have saved of each parameter, by kind of vector (the parameters, momentum) and name."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for tensors in parts:
        for name in tensors:
            kind, *rest = name.split("|")
            if kind.partition(".")[0] == DENSE:
                found.setdefault(kind, {}).setdefault(rest[0], []).append((int(rest[1]), tensors[name]))
    return found


def parameters(folder: Path, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the model's whole parameters together from servers' files.
    A table row that nobody has touched has its initial values.

    Args:
        folder: of the checkpoint.
        model: a worker's parameters, in the model's order; those that servers keep are replaced.

    Raises:
        UserError: the parts do not make the model.
    """
    parts = parts_of(folder)
    try:
        dense = {name: whole(model[name], cut) for name, cut in pieces(parts).get(DENSE, {}).items()}
        kept = {name: about for part in parts for name, about in part.tables.items()}
        for name, about in kept.items():
            if about.num_rows is None:
                raise UserError(str(folder), f"its table {name} takes any id, so that no file of weights can hold all rows", "the run's persistables")  # fmt: skip
            dense[f"{name}.weight"] = _table(parts, name, about)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        why_not = f"its servers' parts cannot be put together ({type(error).__name__}: {why(error)})"
        raise UserError(str(folder), why_not, "another checkpoint") from error
    return {**model, **dense}


def whole(like: torch.Tensor, cut: Sequence[Piece]) -> torch.Tensor:
    """Put a parameter, or its optimizer state, together from its pieces.

    Raises:
        ValueError: some are missing.
    """
    flat = torch.empty(like.numel(), dtype=like.dtype)
    if sum(len(values) for _, values in cut) != len(flat):
        raise ValueError("pieces are missing")
    for start, values in cut:
        flat[start : start + len(values)] = values
    return flat.view(like.shape)


def _table(parts: Sequence[ServerFile], name: str, about: TableFacts) -> torch.Tensor:
    """(rows, columns) of a table."""
    assert about.num_rows is not None
    weight = fresh_table(about.seed, name, (about.num_rows, about.dim), RowInit(about.init, about.scale), about.kind)
    for part in parts:
        rows = part[f"{TABLE}|{name}|rows"]
        weight.index_copy_(0, part[f"{TABLE}|{name}|ids"], rows[:, : about.dim])
    return weight
