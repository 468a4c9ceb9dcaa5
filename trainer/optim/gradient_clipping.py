"""Clips the gradients of an update, dense or sparse, by value or by norm, in as many kernels for any model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from trainer.host.sharded import local


def _values_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The values of these parameters' gradients; sparse ones are coalesced first, so that norms are right. Of sharded
    ones, this worker's shard."""
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        values.append(parameter.grad._values() if parameter.grad.is_sparse else local(parameter.grad))
    return values


def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip each gradient element into [-limit, limit] like ``torch.nn.utils.clip_grad_value_``, dense or sparse."""
    if values := _values_of(parameters):
        torch._foreach_clamp_min_(values, -limit)
        torch._foreach_clamp_max_(values, limit)


def clip_norm(
    parameters: Iterable[torch.Tensor], limit: float, whole_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Scale gradients to an L2 norm of at most ``limit`` like ``torch.nn.utils.clip_grad_norm_``, dense or sparse.

    Args:
        whole_norm: makes the norm of the whole gradient from that of these parameters' shards; None: they are whole.

    Returns:
        The norm before clipping.
    """
    values = _values_of(parameters)
    if not values:
        return torch.zeros(())
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    norm = norm if whole_norm is None else whole_norm(norm)
    torch._foreach_mul_(values, (limit / (norm + 1e-6)).clamp_max(1.0))
    return norm
