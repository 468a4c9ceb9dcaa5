"""Nested states (dicts, lists, tuples, numbers, texts, tensors, arrays) as one safetensors file; no code is run.

The tensors are those of the file. The rest is JSON in its metadata (``tree``): plain values are themselves, and all
others are ``[kind, ...]``, such as ``["tensor", NAME]`` or ``["dict", [[KEY, VALUE], ...]]``. A tensor of which several
workers have pieces is ``["pieces", NAME, WORKERS, SHAPE, AXES]``: the files of these workers have tensors of that name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.checkpoint import store
from trainer.checkpoint.pinned import PinnedMemory
from trainer.errors import UserError, why
from trainer.host import json_text
from trainer.host.sharded import Piece, Stored, each_tensor, order_in_memory, ordered

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
        pieces: a state that is in another worker's file. This file gets the worker's pieces of it.

    Raises:
        TypeError: the state holds something else; the message says where.
    """

    def __init__(self, state: Any, pinned: PinnedMemory | None = None, pieces: Any = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.pinned, self.events, on_gpu = pinned, list[torch.cuda.Event](), dict[str, torch.Tensor]()
        self._later = on_gpu if pinned is not None else None
        self._keep_pieces(pieces, "")  # first, so that they have the names that the other worker's file says
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
            if self.pinned is not None:
                self.pinned.wait(self.events)
            save_file(self.tensors, path, metadata={"format": "pt", "tree": self.text})
        except SafetensorError as error:  # a full disk, too
            raise OSError(why(error)) from error
        finally:
            if self.pinned is not None:
                self.pinned.release()

    def _keep_pieces(self, node: Any, path: str) -> None:
        """Keep this worker's pieces in a state."""
        if isinstance(node, Piece):
            self._keep_piece(node, path)
        elif isinstance(node, (Mapping, list, tuple)):
            for key, one in node.items() if isinstance(node, Mapping) else enumerate(node):
                self._keep_pieces(one, f"{path}.{key}")

    def _keep_piece(self, piece: Piece, path: str) -> str:
        """Keep this worker's piece under the name that it has in the file of each worker; returns the name."""
        if (name := f"{_name(path)}|piece") in self.tensors:
            raise _not_held(path, "a second tensor under this name")
        if piece.tensor is not None:
            self._keep(piece.tensor, path, name)
        return name

    def _plain(self, node: Any, path: str, depth: int) -> Any:
        """The node as JSON; tensors are kept in ``self.tensors``."""
        if isinstance(node, Piece):
            return ["pieces", self._keep_piece(node, path), *map(list, (node.workers, node.shape, node.axes))]
        if isinstance(node, torch.Tensor):
            axes = order_in_memory(node)
            return ["tensor", self._keep(node, path), *([axes] if axes else [])]
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

    def _keep(self, tensor: torch.Tensor, path: str, name: str = "") -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise _not_held(path, f"a tensor without plain values ({kind}, {tensor.dtype})")
        if tensor.dtype not in KINDS:
            raise _not_held(path, f"a tensor of {tensor.dtype}")
        name = name or _name(path)
        while name in self.tensors or name == "__metadata__":
            name += "'"
        plain = tensor.detach().resolve_conj().resolve_neg()
        if self._later is not None and plain.device.type == "cuda":
            self.tensors[name] = self._later[name] = plain
            return name
        copied = plain.to("cpu", copy=True)
        self.tensors[name] = copied if copied.is_contiguous() else copied.contiguous()
        return name


def _name(path: str) -> str:
    """The name of a tensor in the file, from its place in the state."""
    return _place(path).encode("ascii", "backslashreplace").decode()


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


def read(path: Path, keys: Collection[str] | None = None, stored: bool = False) -> Any:
    """Read a nested state (dicts, lists, tensors) from the safetensors file that it was written to.

    Tensors are copied out of the file, where they are aligned to 8 bytes. Matrix products on memory with another
    alignment than torch's own round differently, so a resumed run would not equal an undisturbed one.

    Args:
        keys: read only these keys of the outermost dict; None: all.
        stored: leave tensors of which several workers have pieces in their files (:class:`Stored`).

    Raises:
        UserError: it is no such file, or it lacks a piece.
    """

    def together(name: str, workers: Sequence[int], shape: Sequence[int], axes: Sequence[int]) -> Any:
        found = Stored([_mapped(path.parent / store.part_of(worker), name) for worker in workers], shape, axes)
        if not found.fits():
            raise ValueError(f"the pieces of {name} do not make a tensor of {tuple(shape)}")
        return found if stored else found.whole()

    with _refusing(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        tree = json_text.loads((file.metadata() or {}).get("tree", ""))
        if keys is not None:
            tree = ["dict", [pair for pair in _parts(tree, "dict") if _parts(pair)[0] in keys]]
        return _Unpacking(lambda name: file.get_tensor(name).clone(), together).node(tree, 0)


def _mapped(path: Path, name: str) -> torch.Tensor:
    """A tensor in the memory that a file is mapped to: its values are read where they are used."""
    with _refusing(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        found: torch.Tensor = file.get_tensor(name)
        return found


def outline(path: Path, keys: Collection[str]) -> Any:
    """Read a nested state like :func:`read`, but with tensors on the meta device, of their shape and dtype: no values
    are read.

    Raises:
        UserError: it is no such file.
    """
    with _refusing(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        tree = json_text.loads((file.metadata() or {}).get("tree", ""))
        tree = ["dict", [pair for pair in _parts(tree, "dict") if _parts(pair)[0] in keys]]
        empty = _Unpacking(
            lambda name: torch.empty(file.get_slice(name).get_shape(), device="meta"),
            lambda name, workers, shape, axes: torch.empty(shape, device="meta"),
        )
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
        together: reads a tensor of which workers have pieces, from its name, these workers, its shape and its axes.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor], together: Callable[..., Any]) -> None:
        self.tensor, self.together = tensor, together
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
        if kind == "pieces":
            return self.pieces(content, *more)
        if kind == "tensor" and len(more) <= 1:
            return ordered(self.once(content), *more)
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
        self._see(name)
        return self.tensor(name)

    def pieces(self, name: str, workers: list[int], shape: list[int], axes: list[int]) -> Any:
        """Read a tensor from its pieces."""
        numbers = [number for some in (workers, shape, axes) for number in some]
        if not workers or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("pieces without numbers")
        if sorted(set(workers)) != workers:
            raise ValueError("a worker with two pieces of a tensor")
        self._see(name)
        return self.together(name, workers, shape, axes)

    def _see(self, name: str) -> None:
        if name in self.seen:
            raise ValueError("a tensor is named twice")
        self.seen.add(name)


def on_device(node: Any, device: torch.device | str) -> Any:
    """A nested state (dicts, lists, tuples) with its tensors moved to a device."""
    return each_tensor(node, lambda tensor: tensor.to(device))
