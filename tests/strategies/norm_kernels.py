"""What torch's kernels of a synchronised batch norm compute, by operators that a CPU has. They run on GPUs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

Tensor = torch.Tensor


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = _dims(x)
    return x.mean(dims), (x.var(dims, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    mean, squares, n = torch.zeros_like(means[0]), torch.zeros_like(means[0]), torch.zeros_like(counts[0])
    for other, invstd, count in zip(means, invstds, counts, strict=True):  # Welford's formula, in the kernel's order
        factor = 1 / (n + count)
        squares += (invstd**-2 - eps) * count + (mean - other) ** 2 * n * count * factor
        mean = n * factor * mean + count * factor * other
        n = n + count
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(squares / (n - 1), momentum)
    return mean, (squares / n + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    y = (x - _wide(mean, x)) * _wide(invstd, x)
    return y if weight is None or bias is None else y * _wide(weight, x) + _wide(bias, x)


def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy, sum_dy_xmu = dy.sum(_dims(x)), (dy * (x - _wide(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    n = counts.sum()
    slope = invstd if weight is None else invstd * weight
    centred = dy - _wide(sum_dy / n, x) - (x - _wide(mean, x)) * _wide(sum_dy_xmu / n * invstd**2, x)
    return centred * _wide(slope, x)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context manager: torch has these kernels on the CPU."""
    kernels = (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(patch.object(torch, kernel.__name__, kernel))
        yield


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))
