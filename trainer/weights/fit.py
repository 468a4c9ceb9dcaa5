"""Checks whether saved weights fit a model of the same architecture, and loads them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from trainer.errors import UserError
from trainer.visible import shortened
from trainer.weights import tensor_files
from trainer.weights.tensor_files import some_names

WRAPPED = "module."
"""What DistributedDataParallel and DataParallel put before every name."""
T = TypeVar("T")


def check(path: Path, model: nn.Module, called: str) -> None:
    """Refuse a file of weights that lacks a parameter or buffer of the model, has another shape, or has extra ones.

    Args:
        model: may be on the meta device.
        called: what the model is called in a sentence.

    Raises:
        UserError: it has not, or it cannot be read; naming what differs.
    """
    own = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = unwrapped(tensor_files.outlines(path, f"weights={path}"), wanted)
    there = {name: outline.shape for name, outline in found.items()}
    missing = [one[0] for one in _same_tensors(model) if not any(name in there for name in one)]
    passing = {name for name, _ in model.named_buffers()}  # a checkpoint has those too that no state_dict has
    unknown = [name for name in there if name not in wanted and name not in passing]
    other = [f"{n} is {there[n]} there and {wanted[n]} here" for n in there if n in wanted and there[n] != wanted[n]]
    tables = [name for name in tensor_files.left_out(path) if name in missing]
    faults = [
        *([f"it lacks {some_names(lacking)}"] if (lacking := [name for name in missing if name not in tables]) else []),
        *(
            [
                f"the run left the table {some_names(tables)} out of it (strategy.export_limit) and keeps its rows in checkpoints/persistables"
            ]
            if tables
            else []
        ),
        *([f"it has {some_names(unknown)}, which the model has not"] if unknown else []),
        *([some_names(other, "; ")] if other else []),
    ]
    if faults:
        raise UserError(f"weights={path}", f"does not fit the model ({called}): {'; '.join(faults)}", "the model and the data that it was trained with")  # fmt: skip
    _refuse_complex((name for name, outline in found.items() if outline.is_complex), own, f"weights={path}")


def load(path: Path, model: nn.Module) -> None:
    """Copy a file's weights into the model, in the model's dtypes and on its device.

    Raises:
        UserError: they do not fit.
    """
    check(path, model, type(model).__name__)
    own = model.state_dict()
    found = unwrapped(tensor_files.read(path, f"weights={path}"), own)
    into(model, found, f"weights={path}")  # of one and the same tensor under several names the file may have one


def _refuse_complex(names: Iterable[str], own: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuse complex tensors in a file of weights for real parameters.

    Raises:
        UserError: those of these names should.
    """
    wrong = [name for name in names if name in own and not own[name].is_complex()]
    if wrong:
        raise UserError(what, f"holds complex numbers where the model's are real ({some_names(wrong)})", "weights of this model")  # fmt: skip


def into(model: nn.Module, by_name: dict[str, torch.Tensor], what: str) -> None:
    """Load tensors of a file into the model, in its dtypes and on its device; its other tensors stay.

    Raises:
        UserError: it cannot take them.
    """
    own = model.state_dict()
    _refuse_complex((name for name, tensor in by_name.items() if tensor.is_complex()), own, what)
    try:
        model.load_state_dict(by_name, strict=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(what, f"does not go into the model: {shortened(' '.join(lines[-1:]))}") from error


def unwrapped(by_name: Mapping[str, T], own: Container[str]) -> dict[str, T]:
    """Rename a file's tensors to the model's own names, without the prefix ``module.`` of a wrapper such as DDP."""
    return {name if name in own else name.removeprefix(WRAPPED): one for name, one in by_name.items()}


def _same_tensors(model: nn.Module) -> list[list[str]]:
    """The names of the state_dict, those of one and the same tensor together (safetensors keep it once)."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())
