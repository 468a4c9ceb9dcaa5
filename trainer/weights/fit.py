"""Checks whether saved weights fit a model of the same architecture, and loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from trainer.errors import UserError
from trainer.host.sharded import distributed
from trainer.visible import shortened
from trainer.weights import tensor_files
from trainer.weights.state_dicts import renamed, some_names

Shape = tuple[int, ...]


def check(path: Path, model: nn.Module, called: str) -> str:
    """Refuse a file of weights that lacks a parameter or buffer of the model, has another shape, or has extra ones.

    Args:
        model: may be on the meta device.
        called: the model's name in messages.

    Returns:
        which part of the file is used, and what is not; empty: all of it is used.

    Raises:
        UserError: it does not fit, or cannot be read; the error's notes are a table of the differences.
    """
    own, what = model.state_dict(), f"weights={path}"
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    outlines, said = tensor_files.outlines(path, what)
    found = renamed(outlines, wanted, what)
    there = {name: outline.shape for name, outline in found.tensors.items()}
    missing = [one[0] for one in _same_tensors(model) if not any(name in there for name in one)]
    passing = {name for name, _ in model.named_buffers()}  # a checkpoint also has non-persistent buffers
    unknown = [name for name in there if name not in wanted and name not in passing]
    tables = [name for name in tensor_files.left_out(path) if name in missing]
    if tables:
        raise UserError(
            what,
            (
                f"does not fit the model ({called}): the run left the table {some_names(tables)} out of it "
                f"(strategy.export_limit) and keeps its rows in checkpoints/persistables"
            ),
            "the model and the data that it was trained with",
        )
    refuse_misfit(
        what, f"does not fit the model ({called})", len(wanted), missing, unknown, other_shapes(there, wanted)
    )
    _refuse_complex((name for name, outline in found.tensors.items() if outline.is_complex), own, what)
    return "; ".join(filter(None, [said, found.said]))


def other_shapes(there: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """A sentence for each tensor that has another shape in the file than in the model."""
    return [f"{n} is {there[n]} there and {wanted[n]} here" for n in there if n in wanted and there[n] != wanted[n]]


def refuse_misfit(
    what: str, why: str, count: int, missing: Sequence[str], unknown: Sequence[str], other: Sequence[str]
) -> None:
    """Refuse weights that do not fit a model of ``count`` tensors: numbers in a sentence, names in a table below it.

    Raises:
        UserError: any of the lists holds something.
    """
    if not (missing or unknown or other):
        return
    differences = [f"of its {count} tensors {len(missing)} are missing"] * bool(missing)
    differences += [f"{len(unknown)} are unknown to the model"] * bool(unknown)
    differences += [f"{len(other)} have another shape"] * bool(other)
    error = UserError(what, f"{why}: {', '.join(differences)}", "the model and the data that it was trained with")
    for row, names in (("missing", missing), ("unknown", unknown), ("shape", other)):
        if names:
            error.add_note(f"  {row:<9}{some_names(names)}")
    raise error


def load(path: Path, model: nn.Module) -> None:
    """Copy a file's weights into the model, in the model's dtypes and on its device.

    Raises:
        UserError: they do not fit.
    """
    check(path, model, type(model).__name__)
    own = model.state_dict()
    found = renamed(tensor_files.read(path, f"weights={path}"), own, f"weights={path}")
    load_tensors(model, found.tensors, f"weights={path}")  # a shared tensor may have only one of its names in the file


def _refuse_complex(names: Iterable[str], own: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuse complex tensors in a file of weights for real parameters.

    Raises:
        UserError: a tensor of these names is for a real parameter.
    """
    wrong = [name for name in names if name in own and not own[name].is_complex()]
    if wrong:
        raise UserError(
            what, f"holds complex numbers where the model's are real ({some_names(wrong)})", "weights of this model"
        )


def load_tensors(model: nn.Module, by_name: dict[str, torch.Tensor], what: str) -> None:
    """Load tensors of a file into the model, in its dtypes and on its device; its other tensors stay.

    Raises:
        UserError: it cannot take them.
    """
    own = model.state_dict()
    _refuse_complex((name for name, tensor in by_name.items() if tensor.is_complex()), own, what)
    try:
        model.load_state_dict({n: distributed(own[n], t) if n in own else t for n, t in by_name.items()}, strict=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(what, f"does not go into the model: {shortened(' '.join(lines[-1:]))}") from error


def _same_tensors(model: nn.Module) -> list[list[str]]:
    """The names of the state_dict, those of one and the same tensor together (safetensors keep it once)."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())
