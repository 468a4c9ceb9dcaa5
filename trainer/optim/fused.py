"""Fused optimizers: torch's kernels that make an update of all parameters at once (``execution.fused_optimizer``).

With a GradScaler (fp16) they also skip an update on the device, so that the host waits for nothing. torch 2.15 leaves
two things to its caller, which :func:`prepare` does after an optimizer is made, and after its state is loaded:

- SGD makes its momentum buffers in the first step, and the kernel fills them. If that step is skipped, which is usual
  in fp16, they hold what was in memory before. Here they begin at zero, which gives the same first step. A dampening,
  which torch leaves out of the first step alone, is refused.
- The kernels on CPUs read a parameter, its gradient and its state in the order of memory, whatever their strides are.
  State is loaded in the parameter's own layout, and parameters with gaps in memory are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainer.optim.states import is_fused

BY_AUTO = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes that ``execution.fused_optimizer=auto`` fuses on GPUs."""
OTHER_LOOPS = ("foreach", "differentiable")
"""Arguments of torch's optimizers that exclude ``fused``."""


def why_not(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Why an optimizer cannot be fused for these parameters, by name; empty: it can."""
    kind = type(optimizer)
    if not is_fused(optimizer) and "fused" not in inspect.signature(kind.__init__).parameters:
        return f"torch has no fused kernels for {kind.__name__}"
    for group in optimizer.param_groups:
        if typed := [name for name in OTHER_LOOPS if group.get(name)]:
            return f"optimizer.{typed[0]}=true excludes fused kernels"
        if group.get("momentum") and group.get("dampening"):
            return "the fused kernels of torch apply a dampening wrongly after a first update that fp16 skips"
    for name, parameter in parameters:
        if not parameter.is_floating_point():
            return f"{name} has numbers of {str(parameter.dtype).removeprefix('torch.')}, which fused kernels lack"
        if not is_dense(parameter):
            return f"{name} has gaps in memory, which fused kernels do not respect"
    return ""


def why_not_by_auto(optimizer: torch.optim.Optimizer, tables: bool) -> str:
    """Why ``auto`` does not fuse an optimizer that could be; empty: it does.

    Args:
        tables: the model has sparse tables, which have an optimizer of their own.
    """
    if type(optimizer) not in BY_AUTO:
        return f"it fuses {', '.join(kind.__name__ for kind in BY_AUTO[:-1])} and {BY_AUTO[-1].__name__} of torch"
    if tables:
        return "the rows of tables have an optimizer of their own, which is not fused"
    return ""


@torch.no_grad()
def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Make momentum buffers that are missing, and lay out state like its parameters. Other optimizers stay as they
    are."""
    for group, parameter in _fused_parameters(optimizer):
        state = optimizer.state[parameter]
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not _alike(value, parameter):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps in memory, in whichever order its axes lie."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis])).is_contiguous()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; an axis of one element may have any stride."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


def _fused_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in optimizer.param_groups:
        if group.get("fused"):
            yield from ((group, parameter) for parameter in group["params"])
