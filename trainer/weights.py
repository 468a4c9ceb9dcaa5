"""Weights in files, safetensors or a state_dict of torch's: do they fit a model, and into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError, first_line

MOST_NAMED = 4


def check(path: Path, model: nn.Module, called: str) -> None:
    """The file has every parameter and buffer of the model in its shape, and no other.

    Args:
        model: may be on the meta device.
        called: what the model is called in a sentence.

    Raises:
        UserError: it has not, or it cannot be read; naming what differs.
    """
    there = shapes(path)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [one[0] for one in _same_tensors(model) if not any(name in there for name in one)]
    unknown = [name for name in there if name not in wanted]
    other = [f"{n} is {there[n]} there and {wanted[n]} here" for n in there if n in wanted and there[n] != wanted[n]]
    faults = [
        *([f"it lacks {_some(missing)}"] if missing else []),
        *([f"it has {_some(unknown)}, which the model has not"] if unknown else []),
        *([_some(other, "; ")] if other else []),
    ]
    if faults:
        raise UserError(f"weights={path}", f"does not fit the model ({called}): {'; '.join(faults)}", "the model and the data that it was trained with")  # fmt: skip


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the file.

    Raises:
        UserError: it cannot be read as what its name says.
    """
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in _state_dict(path).items()}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights={path}", f"cannot be read as safetensors: {first_line(error)[:200]}") from error


def load(path: Path, model: nn.Module, device: torch.device) -> None:
    """Give the model the file's values, in its own types.

    Raises:
        UserError: they do not fit.
    """
    check(path, model, type(model).__name__)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_model

        load_model(model, str(path), device=str(device))
    else:
        model.load_state_dict(_state_dict(path))


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, a pickle, or neither: each breaks in its own way
        why = "cannot be read by torch.load(weights_only=True), which takes a state_dict alone"
        raise UserError(
            f"weights={path}", f"{why}: {first_line(error)[:200]}", "torch.save(model.state_dict(), ...)"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
        kind = f"holds {_some(loaded)}" if isinstance(loaded, dict) else f"is a {type(loaded).__name__}"
        raise UserError(f"weights={path}", f"{kind} and not a state_dict, name -> tensor", "torch.save(model.state_dict(), ...)")  # fmt: skip
    return loaded


def _same_tensors(model: nn.Module) -> list[list[str]]:
    """The names of the state_dict, those of one and the same tensor together (safetensors keep it once)."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _some(names: Iterable[str], between: str = ", ") -> str:
    listed = [str(name) for name in names]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return between.join(listed[:MOST_NAMED]) + more
