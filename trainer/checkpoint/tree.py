"""Nested states (dicts, lists, tuples, numbers, texts, tensors, arrays) as one safetensors file. Reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.errors import UserError

PLAIN = (str, int, float, bool, type(None))


class Packed:
    """A state, copied: what happens to its tensors afterwards changes nothing here.

    Args:
        state: dicts (with keys that are texts or numbers), lists and tuples of plain values, tensors and numpy arrays.

    Raises:
        TypeError: something else is in it; it says where.
    """

    def __init__(self, state: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.text = json.dumps(self._plain(state, ""))

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(t.nbytes for t in self.tensors.values()) + len(self.text)

    def write(self, path: Path) -> None:
        """Write it as a file."""
        save_file(self.tensors, path, metadata={"format": "pt", "tree": self.text})

    def _plain(self, node: Any, path: str) -> Any:
        """What JSON can hold of it; of all that is no plain value, ``[kind, ...]``."""
        if isinstance(node, torch.Tensor):
            return ["tensor", self._keep(node, path), *_order(node)]
        if isinstance(node, np.ndarray):
            return ["array", self._keep(torch.from_numpy(node), path)]
        if isinstance(node, np.generic):
            return self._plain(node.item(), path)
        if isinstance(node, bytes):
            return ["bytes", node.hex()]
        if isinstance(node, Mapping):
            return [
                "dict",
                [[self._plain(k, f"{path}[{k!r}]"), self._plain(v, f"{path}.{k}")] for k, v in node.items()],
            ]
        if isinstance(node, (list, tuple)):
            kind = "tuple" if isinstance(node, tuple) else "list"
            return [kind, [self._plain(v, f"{path}.{n}") for n, v in enumerate(node)]]
        if isinstance(node, PLAIN):
            return node
        raise TypeError(f"{path.lstrip('.') or 'the state'} is a {type(node).__module__}.{type(node).__qualname__}, which a checkpoint cannot hold")  # fmt: skip

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name = path.lstrip(".") or "tensor"
        while name in self.tensors:
            name += "'"
        copied = tensor.detach().to("cpu", copy=True)
        self.tensors[name] = copied if copied.is_contiguous() else copied.contiguous()
        return name


def read(path: Path) -> Any:
    """The state that was written there.

    Raises:
        UserError: it is no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            tree = json.loads((file.metadata() or {}).get("tree", ""))
            return _unpacked(tree, file.get_tensor)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(str(path), f"it cannot be read as a state ({type(error).__name__}: {error})") from error


def _unpacked(node: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, content = node[0], node[1]
    if kind == "tensor":
        return _ordered(tensor(content), *node[2:])
    if kind == "array":
        return tensor(content).numpy()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {_unpacked(k, tensor): _unpacked(v, tensor) for k, v in content}
    values = [_unpacked(v, tensor) for v in content]
    return tuple(values) if kind == "tuple" else values


def _order(tensor: torch.Tensor) -> list[list[int]]:
    """The axes from the outermost in memory to the innermost, where they lie otherwise than usual, as with channels_last."""
    if tensor.is_contiguous() or not tensor.numel():
        return []
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return [axes] if tensor.permute(axes).is_contiguous() else []


def _ordered(tensor: torch.Tensor, axes: list[int] | None = None) -> torch.Tensor:
    """The same with its axes in that order in memory."""
    if axes is None:
        return tensor
    back = [axes.index(axis) for axis in range(len(axes))]
    return tensor.permute(axes).contiguous().permute(back)


def on_device(node: Any, device: torch.device | str) -> Any:
    """The same state with its tensors on a device."""
    if isinstance(node, torch.Tensor):
        return node.to(device)
    if isinstance(node, dict):
        return {key: on_device(value, device) for key, value in node.items()}
    return type(node)(on_device(one, device) for one in node) if isinstance(node, (list, tuple)) else node
