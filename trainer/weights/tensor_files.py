"""Reads files of named tensors: safetensors, torch.save's state_dicts (also nested), or a run's checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.errors import UserError, first_line
from trainer.visible import shortened
from trainer.weights import checkpoint_weights, torch_files

NESTED = ("state_dict", "model")
"""Where checkpoints of others keep the state_dict."""
LEFT_OUT = "left_out"
"""In the header of a run's own safetensors: the tables that it goes without."""
MOST_NAMED = 4


def read(path: Path, what: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a weights file, on the CPU. Nothing in the file is executed.

    Args:
        what: the key and value that named the file.

    Raises:
        UserError: it cannot be read as what its name says.
    """
    if path.is_dir():
        return _plain(checkpoint_weights.read(path), what)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return _plain(load_file(path), what)
        except UserError:
            raise
        except Exception as error:  # crafted headers break it in several ways
            raise _no_safetensors(what, error) from error
    try:
        torch_files.check(path, what)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a zip, a pickle, or neither: each breaks in its own way
        why = "cannot be read by torch.load(weights_only=True), which takes tensors by name alone"
        raise UserError(what, f"{why}: {first_line(error)[:200]}", "torch.save(model.state_dict(), ...)") from error
    for key in NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, torch.Tensor) for t in content.values()):
        kind = f"holds {some_names(content)}" if isinstance(content, dict) else f"is a {type(content).__name__}"
        raise UserError(what, f"{kind} and not a state_dict, name -> tensor", "torch.save(model.state_dict(), ...)")
    return _plain(content, what)


def _plain(by_name: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """The same, if a model can take each of them.

    Raises:
        UserError: one is not a plain array of numbers in memory.
    """
    for name, tensor in by_name.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
            raise UserError(what, f"{shortened(str(name))} is no plain tensor ({kind}, {tensor.layout}, {tensor.device})", "torch.save(model.state_dict(), ...)")  # fmt: skip
        if not _converts(tensor.dtype):
            raise _of_no_use(what, str(name), kind)
    return by_name


def _of_no_use(what: str, name: str, kind: str) -> UserError:
    return UserError(what, f"{shortened(name)} is of the type {kind}, which no model can take", "weights saved as float32 or bfloat16")  # fmt: skip


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


def outlines(path: Path, what: str) -> dict[str, Outline]:
    """The outline of every tensor in a weights file, by name; for safetensors without reading the values.

    Raises:
        UserError: it cannot be read as what its name says.
    """
    if path.suffix != ".safetensors":
        return {name: Outline(tuple(tensor.shape), tensor.is_complex()) for name, tensor in read(path, what).items()}
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
    return found


def left_out(path: Path) -> list[str]:
    """The tables that a safetensors file of weights goes without, by its header (``strategy.export_limit``)."""
    if path.suffix != ".safetensors":
        return []
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return str((file.metadata() or {}).get(LEFT_OUT, "")).split()


def some_names(names: Iterable[object], between: str = ", ") -> str:
    """The first few of many tensor names, and how many more there are, for an error."""
    listed = [shortened(str(name)) for name in names]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return between.join(listed[:MOST_NAMED]) + more


def _no_safetensors(what: str, error: Exception) -> UserError:
    return UserError(what, f"cannot be read as safetensors: {first_line(error)[:200]}")
