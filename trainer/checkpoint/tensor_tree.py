"""Nested states (dicts, lists, tuples, numbers, texts, tensors, arrays) as one safetensors file; no code is run.

The tensors are those of the file. The rest is JSON in its metadata (``tree``): plain values are themselves, and all
others are ``[kind, ...]``, such as ``["tensor", NAME]`` or ``["dict", [[KEY, VALUE], ...]]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.checkpoint.pinned import PinnedMemory
from trainer.errors import UserError, why
from trainer.host import json_text
from trainer.host.transfers import wait_for

PLAIN = (str, int, float, bool, type(None))
DEEPEST = 100
"""Deepest nesting of a state."""
LARGEST = 10**4000
"""Python parses no longer numbers."""
KINDS = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.bool,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    )
)
"""Dtypes of torch that safetensors can hold."""


class Packed:
    """A copy of a nested state, ready to be written.

    Args:
        state: dicts (keys: texts, numbers, tuples of them), lists and tuples of plain values, tensors and numpy arrays.
        pinned: memory for the copies of tensors on a GPU, which :meth:`write` waits for; None: they are waited for now.

    Raises:
        TypeError: the state holds something else; the message says where.
    """

    def __init__(self, state: Any, pinned: PinnedMemory | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.pinned, self.events, on_gpu = pinned, list[torch.cuda.Event](), dict[str, torch.Tensor]()
        self._later = on_gpu if pinned is not None else None
        self.text = json.dumps(self._plain(state, "", 0))
        if pinned is not None and on_gpu:
            copies, self.events = pinned.fill(list(on_gpu.values()))
            self.tensors |= dict(zip(on_gpu, copies, strict=True))
        self._later = None

    @property
    def size(self) -> int:
        """The bytes of the file, without safetensors' header."""
        return sum(t.nbytes for t in self.tensors.values()) + len(self.text)

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            for event in self.events:
                wait_for(event)
            save_file(self.tensors, path, metadata={"format": "pt", "tree": self.text})
        except SafetensorError as error:  # a full disk, too
            raise OSError(why(error)) from error
        finally:
            if self.pinned is not None:
                self.pinned.release()

    def _plain(self, node: Any, path: str, depth: int) -> Any:
        """The node as JSON; tensors are kept in ``self.tensors``."""
        if isinstance(node, torch.Tensor):
            return ["tensor", self._keep(node, path), *_order(node)]
        if isinstance(node, np.ndarray):
            return ["array", self._keep(_tensor_of(node, path), path)]
        if isinstance(node, np.generic):
            return self._plain(node.item(), path, depth)
        if isinstance(node, bytes):
            return ["bytes", node.hex()]
        if isinstance(node, int) and abs(node) >= LARGEST:
            raise _not_held(path, "a number of thousands of digits")
        if isinstance(node, PLAIN):
            return node
        if depth >= DEEPEST:
            raise _not_held(path, f"nested more than {DEEPEST} deep")
        if isinstance(node, Mapping):
            return ["dict", [[_key(k, path), self._plain(v, f"{path}.{k}", depth + 1)] for k, v in node.items()]]
        if isinstance(node, (list, tuple)):
            kind = "tuple" if isinstance(node, tuple) else "list"
            return [kind, [self._plain(v, f"{path}.{n}", depth + 1) for n, v in enumerate(node)]]
        raise _not_held(path, f"a {type(node).__module__}.{type(node).__qualname__}")

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise _not_held(path, f"a tensor without plain values ({kind}, {tensor.dtype})")
        if tensor.dtype not in KINDS:
            raise _not_held(path, f"a tensor of {tensor.dtype}")
        name = _place(path).encode("ascii", "backslashreplace").decode()
        while name in self.tensors or name == "__metadata__":
            name += "'"
        plain = tensor.detach().resolve_conj().resolve_neg()
        if self._later is not None and plain.device.type == "cuda":
            self.tensors[name] = self._later[name] = plain
            return name
        copied = plain.to("cpu", copy=True)
        self.tensors[name] = copied if copied.is_contiguous() else copied.contiguous()
        return name


def _key(key: Any, path: str) -> Any:
    """A key of a dict as JSON holds it."""
    if isinstance(key, np.generic):
        return _key(key.item(), path)
    if isinstance(key, tuple):
        return ["tuple", [_key(part, path) for part in key]]
    if isinstance(key, bytes):
        return ["bytes", key.hex()]
    if not isinstance(key, PLAIN):
        raise _not_held(path, f"a dict with a key of the type {type(key).__qualname__}")
    return key


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape))
    except TypeError:
        raise _not_held(path, f"an array of {array.dtype}") from None


def _place(path: str) -> str:
    """The place in the state as messages show it: ``model.conv1.weight``."""
    return path.removeprefix(".") or "state"


def _not_held(path: str, what: str) -> TypeError:
    return TypeError(f"{_place(path)} is {what}, which a checkpoint cannot hold")


def read(path: Path, keys: Collection[str] | None = None) -> Any:
    """Read a nested state (dicts, lists, tensors) from the safetensors file that it was written to.

    Tensors are copied out of the file, where they are aligned to 8 bytes. Matrix products on memory with another
    alignment than torch's own round differently, so a resumed run would not equal an undisturbed one.

    Args:
        keys: read only these keys of the outermost dict; None: all.

    Raises:
        UserError: it is no such file.
    """
    with _refusing(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        tree = json_text.loads((file.metadata() or {}).get("tree", ""))
        if keys is not None:
            tree = ["dict", [pair for pair in _parts(tree, "dict") if _parts(pair)[0] in keys]]
        return _Unpacking(lambda name: file.get_tensor(name).clone()).node(tree, 0)


def outline(path: Path, keys: Collection[str]) -> Any:
    """Read a nested state like :func:`read`, but with tensors on the meta device, of their shape and dtype: no values
    are read.

    Raises:
        UserError: it is no such file.
    """
    with _refusing(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        tree = json_text.loads((file.metadata() or {}).get("tree", ""))
        tree = ["dict", [pair for pair in _parts(tree, "dict") if _parts(pair)[0] in keys]]
        empty = _Unpacking(lambda name: torch.empty(file.get_slice(name).get_shape(), device="meta"))
        return empty.node(tree, 0)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Context manager: an error while a file is read becomes a UserError."""
    try:
        yield
    except RecursionError as error:
        raise UserError(str(path), "it cannot be read as a state (nested too deep)") from error
    except (OSError, SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(str(path), f"it cannot be read as a state ({type(error).__name__}: {why(error)})") from error


def _parts(node: Any, kind: str = "") -> list[Any]:
    """The list after the kind of a node; without a kind, the node itself, a list.

    Raises:
        ValueError: the node is of another kind, or there is no list.
    """
    if kind and not (isinstance(node, list) and len(node) == 2 and node[0] == kind):
        raise ValueError(f"there is no {kind}")
    found = node[1] if kind else node
    if not isinstance(found, list) or (not found and not kind):
        raise ValueError("a list is missing")
    return found


class _Unpacking:
    """Builds a state from its tree. Each tensor may occur once, so that a small file cannot become a large state.

    Args:
        tensor: reads a tensor by its name.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self.tensor = tensor
        self.seen: set[str] = set()

    def node(self, node: Any, depth: int) -> Any:
        """The part of the state for a node of the tree.

        Raises:
            ValueError: the node is invalid. Values inside may raise other errors.
        """
        if isinstance(node, PLAIN):
            return node
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        kind, content, *more = node
        if kind == "tensor" and len(more) <= 1:
            return _ordered(self.once(content), *more)
        if more:
            raise ValueError(f"{len(more)} parts too many")
        if kind == "array":
            return self.once(content).numpy()
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "dict":
            return {self.node(k, depth + 1): self.node(v, depth + 1) for k, v in _parts(node, "dict")}
        if kind not in ("list", "tuple"):
            raise ValueError("a kind that is not known")
        values = [self.node(v, depth + 1) for v in _parts(node, kind)]
        return tuple(values) if kind == "tuple" else values

    def once(self, name: str) -> torch.Tensor:
        """Read a tensor for the first time."""
        if name in self.seen:
            raise ValueError("a tensor is named twice")
        self.seen.add(name)
        return self.tensor(name)


def _order(tensor: torch.Tensor) -> list[list[int]]:
    """The order of the axes in memory, outermost first, as one item; no item if the tensor is contiguous. With
    channels_last it differs from the shape's order.
    """
    if tensor.is_contiguous() or not tensor.numel():
        return []
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return [axes] if tensor.permute(axes).is_contiguous() else []


def _ordered(tensor: torch.Tensor, axes: list[int] | None = None) -> torch.Tensor:
    """The tensor with its axes in that order in memory."""
    if axes is None:
        return tensor
    if sorted(axes) != list(range(tensor.dim())):
        raise ValueError("an order of axes that the tensor does not have")
    back = [axes.index(axis) for axis in range(len(axes))]
    return tensor.permute(axes).contiguous().permute(back)


def on_device(node: Any, device: torch.device | str) -> Any:
    """A nested state (dicts, lists, tuples) with its tensors moved to a device."""
    if isinstance(node, torch.Tensor):
        return node.to(device)
    if isinstance(node, dict):
        return {key: on_device(value, device) for key, value in node.items()}
    return type(node)(on_device(one, device) for one in node) if isinstance(node, (list, tuple)) else node
