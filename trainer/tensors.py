"""Files of tensors by name: safetensors, or what torch.save made of a state_dict, alone or within a checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.errors import UserError, first_line
from trainer.visible import one_line

NESTED = ("state_dict", "model")
"""Where checkpoints of others keep the state_dict."""
WRAPPED = "module."
"""What DistributedDataParallel and DataParallel put before every name."""
MOST_NAMED = 4
T = TypeVar("T")


def read(path: Path, what: str) -> dict[str, torch.Tensor]:
    """The file's tensors, on the CPU. Nothing in it is executed.

    Args:
        what: the key and value that named the file.

    Raises:
        UserError: it cannot be read as what its name says.
    """
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise _no_safetensors(what, error) from error
    _refuse_packed(path, what)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, a pickle, or neither: each breaks in its own way
        why = "cannot be read by torch.load(weights_only=True), which takes tensors by name alone"
        raise UserError(what, f"{why}: {first_line(error)[:200]}", "torch.save(model.state_dict(), ...)") from error
    for key in NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, torch.Tensor) for t in content.values()):
        kind = f"holds {some(content)}" if isinstance(content, dict) else f"is a {type(content).__name__}"
        raise UserError(what, f"{kind} and not a state_dict, name -> tensor", "torch.save(model.state_dict(), ...)")
    return content


def _refuse_packed(path: Path, what: str) -> None:
    """What torch.save writes is a zip archive whose members are not packed; packed ones could become anything.

    Raises:
        UserError: some are.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # torch says what it is instead
    if packed:
        raise UserError(what, f"is a packed archive ({some(map(one_line, packed))}), as torch.save makes none", "torch.save(model.state_dict(), ...)")  # fmt: skip


def shapes(path: Path, what: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the file; of safetensors without reading them.

    Raises:
        UserError: it cannot be read as what its name says.
    """
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in read(path, what).items()}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise _no_safetensors(what, error) from error


def unwrapped(by_name: Mapping[str, T], own: Container[str]) -> dict[str, T]:
    """The same by the model's own names, which the wrapper of a distributed training may stand before."""
    return {name if name in own else name.removeprefix(WRAPPED): one for name, one in by_name.items()}


def some(names: Iterable[object], between: str = ", ") -> str:
    """The first names, and how many more there are."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return between.join(listed[:MOST_NAMED]) + more


def _no_safetensors(what: str, error: Exception) -> UserError:
    return UserError(what, f"cannot be read as safetensors: {first_line(error)[:200]}")
