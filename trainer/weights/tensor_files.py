"""Reads files of named tensors: safetensors, torch.save's files of any trainer, or a run's checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.errors import UserError, first_line, why
from trainer.visible import shortened
from trainer.wording import quoted

STRAY = (
    (b"version https://git-lfs", "is a pointer of Git LFS, and not the file", "git lfs pull --include {}"),
    (b"<!doctype", "is a web page: a download that has failed", "the file, fetched again"),
    (b"<html", "is a web page: a download that has failed", "the file, fetched again"),
    (b"\x89hdf", "is HDF5, as Keras writes it, which is not read", "weights of PyTorch"),
    (b"\x1f\x8b", "is packed by gzip", "gunzip -c {} > weights.pth"),
)
"""Files that are often mistaken for weights: first bytes, what they are, and what to do."""
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of files by torch.save, in its two formats."""
LEFT_OUT = "left_out"
"""Key in the header of a run's safetensors: the tables that the file lacks."""


def read(path: Path, what: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a weights file, on the CPU. Nothing in the file is executed.

    Args:
        what: the key and value that named the file.

    Raises:
        UserError: it cannot be read.
    """
    if path.is_dir():
        from trainer.weights import checkpoint_weights

        return _plain(checkpoint_weights.read(path), what)
    if _is_safetensors(path, what):
        from safetensors.torch import load_file

        try:
            return _plain(load_file(path), what)
        except UserError:
            raise
        except Exception as error:  # crafted headers break it in several ways
            raise _no_safetensors(what, error) from error
    return _plain(_state_dict(path, what).tensors, what)


def _state_dict(path: Path, what: str, mapped: bool = False) -> Any:
    """The :class:`StateDict` in a file of torch.save's; ``mapped``: for the shapes alone."""
    from trainer.weights import state_dicts, torch_files

    try:
        content: Any = torch_files.read(path, what, mapped)
    except UserError:
        raise
    except Exception as error:  # any error of a damaged zip or pickle
        reason = "cannot be read by torch.load(weights_only=True), which takes tensors by name alone"
        raise UserError(what, f"{reason}: {first_line(error)[:200]}", "torch.save(model.state_dict(), ...)") from error
    return state_dicts.find_state_dict(content, what)


def _is_safetensors(path: Path, what: str) -> bool:
    """Whether a file is safetensors, by its first bytes, as its name may be wrong.

    Raises:
        UserError: it is a file that is often mistaken for weights.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UserError(what, f"cannot be read: {why(error)}") from error
    for begins, kind, instead in STRAY:
        if start.lstrip().lower().startswith(begins):
            raise UserError(what, kind, instead.format(quoted(str(path))))
    if not start:
        raise UserError(what, "is empty", "another file, or a copy that is whole")
    if start[8:9] == b"{":
        return True
    return path.suffix == ".safetensors" and start[:4] != ZIP and start[:1] != PICKLE


def _plain(by_name: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Check that a model can load each tensor; returns the tensors.

    Raises:
        UserError: a tensor is not a plain array of numbers in memory.
    """
    for name, tensor in by_name.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
            raise UserError(
                what,
                f"{shortened(str(name))} is no plain tensor ({kind}, {tensor.layout}, {tensor.device})",
                "torch.save(model.state_dict(), ...)",
            )
        if not _converts(tensor.dtype):
            raise _of_no_use(what, str(name), kind)
    return by_name


def _of_no_use(what: str, name: str, kind: str) -> UserError:
    return UserError(
        what,
        f"{shortened(name)} is of the type {kind}, which no model can take",
        "weights saved as float32 or bfloat16",
    )


@cache
def _converts(kind: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=torch.complex64).copy_(torch.empty(1, dtype=kind))
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Outline(NamedTuple):
    """The shape of a tensor in a weights file, and whether it is complex; known without reading its values."""

    shape: tuple[int, ...]
    is_complex: bool


def outlines(path: Path, what: str) -> tuple[dict[str, Outline], str]:
    """The outline of every tensor in a weights file, by name, without reading the values; and the part of the file.

    Raises:
        UserError: it cannot be read.
    """
    if path.is_dir():
        return {name: _outline(tensor) for name, tensor in read(path, what).items()}, ""
    if not _is_safetensors(path, what):
        found_dict = _state_dict(path, what, mapped=True)
        tensors = _plain(found_dict.tensors, what)
        return {name: _outline(tensor) for name, tensor in tensors.items()}, found_dict.said
    from safetensors import safe_open

    try:
        with safe_open(str(path), "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            kinds = {name: str(one.get_dtype()) for name, one in slices.items()}
            found = {name: Outline(tuple(one.get_shape()), kinds[name][0] == "C") for name, one in slices.items()}
    except Exception as error:
        raise _no_safetensors(what, error) from error
    for name, kind in kinds.items():
        if kind == "F4" or kind.startswith("F6_"):
            raise _of_no_use(what, name, kind)
    for name, outline in found.items():
        if any(size >= 2**63 for size in outline.shape):
            raise UserError(what, f"cannot be read as safetensors: {shortened(name)} has a shape beyond 2**63")
    return found, ""


def _outline(tensor: torch.Tensor) -> Outline:
    return Outline(tuple(tensor.shape), tensor.is_complex())


def left_out(path: Path) -> list[str]:
    """The tables that a safetensors file of weights lacks, by its header (``strategy.export_limit``)."""
    if path.is_dir() or not _is_safetensors(path, str(path)):
        return []
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return str((file.metadata() or {}).get(LEFT_OUT, "")).split()


def _no_safetensors(what: str, error: Exception) -> UserError:
    return UserError(what, f"cannot be read as safetensors: {first_line(error)[:200]}")
