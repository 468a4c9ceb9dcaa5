"""Checks whether saved weights fit a model of the same architecture, and loads them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from trainer.errors import UserError
from trainer.weights import tensor_files
from trainer.weights.tensor_files import some


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
    found = tensor_files.unwrapped(tensor_files.outlines(path, f"weights={path}"), wanted)
    there = {name: outline.shape for name, outline in found.items()}
    missing = [one[0] for one in _same_tensors(model) if not any(name in there for name in one)]
    passing = {name for name, _ in model.named_buffers()}  # a checkpoint has those too that no state_dict has
    unknown = [name for name in there if name not in wanted and name not in passing]
    other = [f"{n} is {there[n]} there and {wanted[n]} here" for n in there if n in wanted and there[n] != wanted[n]]
    tables = [name for name in tensor_files.left_out(path) if name in missing]
    faults = [
        *([f"it lacks {some(lacking)}"] if (lacking := [name for name in missing if name not in tables]) else []),
        *(
            [
                f"the run left the table {some(tables)} out of it (strategy.export_limit) and keeps its rows in checkpoints/persistables"
            ]
            if tables
            else []
        ),
        *([f"it has {some(unknown)}, which the model has not"] if unknown else []),
        *([some(other, "; ")] if other else []),
    ]
    if faults:
        raise UserError(f"weights={path}", f"does not fit the model ({called}): {'; '.join(faults)}", "the model and the data that it was trained with")  # fmt: skip
    tensor_files.refuse_complex((name for name, outline in found.items() if outline.is_complex), own, f"weights={path}")


def load(path: Path, model: nn.Module) -> None:
    """Copy a file's weights into the model, in the model's dtypes and on its device.

    Raises:
        UserError: they do not fit.
    """
    check(path, model, type(model).__name__)
    own = model.state_dict()
    found = tensor_files.unwrapped(tensor_files.read(path, f"weights={path}"), own)
    tensor_files.into(
        model, found, f"weights={path}"
    )  # of one and the same tensor under several names the file may have one


def _same_tensors(model: nn.Module) -> list[list[str]]:
    """The names of the state_dict, those of one and the same tensor together (safetensors keep it once)."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())
