"""Tensors that workers hold in shards: torch's DTensor, cut along one dimension as ``torch.chunk`` cuts; and pieces of
them in checkpoints.

Plain tensors pass through, so that code for whole tensors needs no second case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """A tensor of which each of some workers writes its piece into its own part of a checkpoint.

    Attributes:
        tensor: the piece of this worker; None: it has none.
        workers: those who have one. Put together in this order, along the first dimension, they are the tensor.
        shape: of the tensor. axes: their order in memory, as in the tree of a state; empty: contiguous.
    """

    tensor: torch.Tensor | None
    workers: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()


class Stored:
    """A tensor whose pieces stay in the files of a checkpoint, of which a worker reads the rows that it needs.

    Args:
        pieces: tensors that the files are mapped to. shape, axes: as in :class:`Piece`.
    """

    def __init__(self, pieces: Sequence[torch.Tensor], shape: Sequence[int], axes: Sequence[int] = ()) -> None:
        self.pieces, self.shape, self.axes = pieces, torch.Size(shape), axes

    def fits(self) -> bool:
        """Whether the pieces make a tensor of this shape."""
        if len(self.pieces) == 1:
            return self.pieces[0].shape == self.shape
        rows = sum(len(piece) for piece in self.pieces if piece.shape[1:] == self.shape[1:])
        return rows == self.shape[0] and all(piece.shape[1:] == self.shape[1:] for piece in self.pieces)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Read the rows from ``first`` to before ``last``."""
        found, start = [], 0
        for piece in self.pieces:
            begin, end = max(first - start, 0), min(last - start, len(piece))
            found += [piece[begin:end]] if begin < end else []
            start += len(piece)
        return torch.cat(found or [self.pieces[0][:0]])

    def whole(self) -> torch.Tensor:
        """Read the tensor."""
        found = self.pieces[0].clone() if len(self.pieces) == 1 else torch.cat([*self.pieces])
        return ordered(found, self.axes) if self.axes else found


def order_in_memory(tensor: torch.Tensor) -> list[int]:
    """The axes in the order of memory, outermost first; empty if the tensor is contiguous, or has gaps. With
    channels_last it differs from the shape's order."""
    if tensor.is_contiguous() or not tensor.numel():
        return []
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return axes if tensor.permute(axes).is_contiguous() else []


def ordered(tensor: torch.Tensor, axes: Sequence[int] | None = None) -> torch.Tensor:
    """The tensor with its axes in that order in memory."""
    if axes is None:
        return tensor
    if sorted(axes) != list(range(tensor.dim())):
        raise ValueError("an order of axes that the tensor does not have")
    back = [axes.index(axis) for axis in range(len(axes))]
    return tensor.permute([*axes]).contiguous().permute(back)


def each_tensor(node: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A nested state (dicts, lists, tuples) with each of its tensors changed."""
    if isinstance(node, torch.Tensor):
        return change(node)
    if isinstance(node, Mapping):
        return {key: each_tensor(one, change) for key, one in node.items()}
    return type(node)(each_tensor(one, change) for one in node) if isinstance(node, (list, tuple)) else node


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this worker holds a shard."""
    return hasattr(type(tensor), "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's shard of a tensor, in the same memory; of a plain tensor the tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this worker's device. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def shard_like(live: torch.Tensor, saved: torch.Tensor | Stored) -> torch.Tensor:
    """The part of a whole tensor that belongs to this worker's shard of ``live``. Nothing is exchanged."""
    if not is_sharded(live):
        return saved.whole() if isinstance(saved, Stored) else saved
    cut: Any = live
    mesh = cut.device_mesh
    [(axis, placement)] = [(n, one) for n, one in enumerate(cut.placements) if one.is_shard()]
    if placement.dim:
        raise ValueError(f"a tensor that is cut along dimension {placement.dim}")
    each = -(-len(live) // mesh.size(axis))
    first = min(each * mesh.get_local_rank(axis), len(live))
    last = min(first + each, len(live))
    return saved.rows(first, last) if isinstance(saved, Stored) else saved[first:last]


def put(live: torch.Tensor, saved: torch.Tensor | Stored) -> None:
    """Copy a whole tensor into a live one, or this worker's part of it into the shard."""
    with torch.no_grad():
        if isinstance(saved, Stored) or not is_sharded(saved):
            local(live).copy_(shard_like(live, saved))
        else:
            local(live).copy_(local(saved))


def distributed(live: torch.Tensor, saved: Any) -> Any:
    """A whole tensor as a DTensor with the layout of ``live``, of which this worker keeps its shard. What is no tensor
    of its shape stays as it is."""
    if not is_sharded(live) or is_sharded(saved) or getattr(saved, "shape", None) != live.shape:
        return saved.whole() if isinstance(saved, Stored) else saved
    from torch.distributed.tensor import DTensor

    part = shard_like(live, saved).to(live.device, copy=True).contiguous()
    mesh, placements = live.device_mesh, live.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=live.shape, stride=live.stride())
