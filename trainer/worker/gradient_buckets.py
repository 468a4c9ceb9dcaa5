"""Finds the buckets in which DDP will exchange a model's gradients, without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.schema import CollectiveStrategy
from trainer.planning.auto import Buckets

MIB = 2**20


def buckets_of(
    model: nn.Module, forward: Callable[[], Any], strategy: CollectiveStrategy, dtype: torch.dtype | None = None
) -> Buckets | None:
    """Find the gradient buckets of a model in ``DistributedDataParallel(model, bucket_cap_mb=...)``.

    After the first backward DDP makes new buckets in the order in which the gradients came, so that one backward is
    tried here; on torch's meta device that costs no memory. With ``find_unused_parameters`` alone the first buckets
    stay: in the order of the parameters, from the last to the first.

    Args:
        model: with its parameters frozen as in the run.
        forward: one forward of it in training, to outputs; or the exception.
        dtype: of the gradients in the run; None: as the parameters are.

    Returns:
        The sizes in bytes, in the order of their exchange; None: a backward cannot be tried.
    """
    parameters, by_row = _parameters(model)
    stays = strategy.find_unused_parameters and not strategy.static_graph
    order = [*range(len(parameters))] if stays else _arrivals(parameters, forward)
    if order is None:
        return None
    # One cap for all buckets: torch makes the first one smaller only where it has its own default.
    cap = int(strategy.bucket_cap_mb * MIB)
    gradients = [torch.empty(p.shape, dtype=dtype or p.dtype, device="meta") for p in parameters]
    ordered = [gradients[i] for i in order]
    groups, _ = dist._compute_bucket_assignment_by_size(ordered, [cap], by_row, [] if stays else order)
    sizes = [sum(gradients[i].nbytes for i in group) for group in groups if not any(by_row[i] for i in group)]
    return Buckets(sizes[::-1] if stays else sizes, sum(by_row))


def _parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[bool]]:
    """The parameters that DDP exchanges, each once, and which of them have gradients by row."""
    found: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        by_row = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(parameter, by_row)
    return [*found], [*found.values()]


def _arrivals(parameters: list[nn.Parameter], forward: Callable[[], Any]) -> list[int] | None:
    """The parameters' numbers in the order in which a backward has their gradients, those without one at the end."""
    order: list[int] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i)) for i, p in enumerate(parameters)]  # type: ignore[misc]
    try:
        outputs = forward()
        if not isinstance(outputs, torch.Tensor):
            return None
        outputs.sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # of a model whose operations the meta device lacks
        return None
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None
    return [*order, *(i for i in range(len(parameters)) if i not in set(order))]
