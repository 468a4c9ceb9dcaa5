"""Tensors that workers hold in shards: torch's DTensor, cut along one dimension as ``torch.chunk`` cuts.

Plain tensors pass through, so that code for whole tensors needs no second case.
"""

from __future__ import annotations

from typing import Any

import torch


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


def shard_like(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that belongs to this worker's shard of ``live``. Nothing is exchanged."""
    if not is_sharded(live):
        return saved
    mesh: Any = live.device_mesh  # type: ignore[attr-defined]
    for axis, placement in enumerate(live.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            parts, index = saved.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            saved = parts[index] if index < len(parts) else saved.narrow(placement.dim, 0, 0)
    return saved


def put(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy a whole tensor into a live one, or this worker's part of it into the shard."""
    with torch.no_grad():
        local(live).copy_(local(saved) if is_sharded(saved) else shard_like(live, saved))


def distributed(live: torch.Tensor, saved: Any) -> Any:
    """A whole tensor as a DTensor with the layout of ``live``, of which this worker keeps its shard. What is no tensor
    of its shape stays as it is."""
    if not is_sharded(live) or is_sharded(saved) or getattr(saved, "shape", None) != live.shape:
        return saved
    from torch.distributed.tensor import DTensor

    part = shard_like(live, saved).to(live.device, copy=True).contiguous()
    mesh, placements = live.device_mesh, live.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=live.shape, stride=live.stride())
