"""Reads the files of parameter servers, one each, and puts the model's parameters together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import UserError, why
from trainer.host import json_text
from trainer.weights.fresh_rows import RowInit, fresh_table
from trainer.weights.merged_rows import MergedRows

DENSE, TABLE = "dense", "table"
"""First parts of tensor names: pieces of dense parameters (``dense|NAME|START``), rows of tables
(``table|NAME|ids``)."""
REMOVED, SINCE = "removed", "since"
"""In an increment: the tensor of removed ids (``table|NAME|removed``), and the metadata key with the version of the
full part."""
BEGAN = "began"
"""Key in the server's metadata: by table, the version at which the table's rule (Adam, ...) began."""
BY_ROW = ("ids", "rows", "touched")
"""Tensors of a table with an entry for each row."""


@dataclass(frozen=True)
class TableFacts:
    """The facts about a table in a server's file: columns, dtype, sparse rule, rows and initialisation.

    Attributes:
        num_rows: rows of the table; None: any id. rows: number of existing rows.
    """

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
    """The file of one server; tensors are mapped into memory and read when accessed.

    The file of an increment has only the rows that have changed since a full part, which lies beside it. A reader gets
    all rows, put together from both files.
    """

    server: int
    path: Path

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, framework="pt")  # type: ignore[no-untyped-call]

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The server's metadata, besides its tensors."""
        return dict(json_text.loads(self._file.metadata()["meta"]))

    @property
    def version(self) -> int:
        """The number of updates that the server had applied."""
        return int(self.meta["version"])

    def steps(self, table: str) -> int:
        """The number of steps that the rule of a table has made."""
        return self.version - int(self.meta.get(BEGAN, {}).get(table, 0))

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
        return {name: TableFacts(**facts) for name, facts in self.meta["tables"].items()}

    @cached_property
    def full(self) -> ServerFile | None:
        """The full part beside this file, if this is an increment; None: this file is a full part.

        Raises:
            ValueError: the file there is another one.
        """
        if SINCE not in self.meta:
            return None
        found = ServerFile(self.server, self.path.with_name(full_name(self.server)))
        if (found.life, found.version) != (self.life, self.meta[SINCE]) or SINCE in found.meta:
            raise ValueError(f"{found.path.name} is not what {self.path.name} is an increment of")
        return found

    @cached_property
    def _merged(self) -> dict[str, MergedRows]:
        """The merged rows of each table, by the prefix of its tensors' names."""
        return {}

    def keys(self) -> list[str]:
        """The names of the tensors that the server has saved."""
        return [
            name
            for name in self._file.keys()  # noqa: SIM118 (no mapping)
            if not (name.startswith(f"{TABLE}|") and name.endswith(f"|{REMOVED}"))
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor that the server has saved by its name; rows of a table come from both files of an increment."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        table, _, key = name.rpartition("|")
        if self.full is None or key not in BY_ROW or not table.startswith(f"{TABLE}|"):
            return tensor
        merged = self._merged_rows(table)
        if key == "ids":
            return torch.from_numpy(merged.ids)
        return merged.rows(self.full.tensor(name), tensor)

    def _merged_rows(self, table: str) -> MergedRows:
        if table not in self._merged:
            assert self.full is not None
            ids = (
                self.full.tensor(f"{table}|ids"),
                *(self._file.get_tensor(f"{table}|{key}") for key in ("ids", REMOVED)),
            )
            self._merged[table] = MergedRows.of(*(one.numpy() for one in ids))
        return self._merged[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensor(name)


Tensors = Mapping[str, torch.Tensor] | ServerFile
Piece = tuple[int, torch.Tensor]
"""An offset in a flat parameter, and the elements (n,) from there on."""


def part_name(server: int | str) -> str:
    """The name of the file in which a parameter server saves its part: ``server-0.safetensors``."""
    return f"server-{server}.safetensors"


def full_name(server: int | str) -> str:
    """The name of the server's file that an increment goes with, its full part: ``full-0.safetensors``."""
    return f"full-{server}.safetensors"


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
    A table row without an update has its initial values.

    Args:
        folder: of the checkpoint.
        model: a worker's parameters, in the model's order; those of the servers replace them.

    Raises:
        UserError: the parts do not make the model.
    """
    parts = parts_of(folder)
    try:
        dense = {name: whole(model[name], cut) for name, cut in pieces(parts).get(DENSE, {}).items()}
        kept = {name: about for part in parts for name, about in part.tables.items()}
        for name, about in kept.items():
            if about.num_rows is None:
                raise UserError(
                    str(folder),
                    f"its table {name} takes any id, so that no file of weights can hold all rows",
                    "the run's persistables",
                )
            dense[f"{name}.weight"] = _table(parts, name, about)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        why_not = f"its servers' parts cannot be put together ({type(error).__name__}: {why(error)})"
        raise UserError(str(folder), why_not, "another checkpoint") from error
    return {**model, **dense}


def whole(like: torch.Tensor, cut: Sequence[Piece]) -> torch.Tensor:
    """Put a parameter, or its optimizer state, together from its pieces in the servers' files.

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
