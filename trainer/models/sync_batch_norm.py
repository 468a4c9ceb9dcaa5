"""Batch norm over the global batch.

On GPUs it runs on the kernels of torch's ``nn.SyncBatchNorm``, without that class's waits: torch filters out workers
without samples by a mask, which the host reads in every forward. Here such a worker counts with weight 0. On the CPU,
where these kernels do not exist, the same is computed by ordinary operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.nn.functional import all_reduce

NOTHING = 1e-20
"""The number of samples of a worker without samples: torch's kernel divides by sums of these numbers."""


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm*d`` whose training statistics are over the samples of all workers.

    Shapes: (N, C, ...) in and out. The gradient flows through the all-reduced sums.

    Attributes:
        share: 0.0 while this worker's samples do not count, else 1.0.
    """

    share = 1.0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        return self.by_kernels(input) if input.device.type == "cuda" else self.by_operators(input)

    def by_kernels(self, input: torch.Tensor) -> torch.Tensor:
        """The training forward on a GPU."""
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        momentum = self._count_batch() if self.track_running_stats else 0.0
        normalised: torch.Tensor = _ByKernels.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, *running, self.eps, momentum, self.share
        )
        return normalised

    def by_operators(self, input: torch.Tensor) -> torch.Tensor:
        """The training forward elsewhere."""
        x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        dims = [0, *range(2, x.dim())]
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([x.sum(dims), count]) * self.share)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean.view(shape)
        variance = all_reduce(centred.pow(2).sum(dims) * self.share) / total
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), total)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        momentum = self._count_batch()
        unbiased = variance * (total / (total - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    def _count_batch(self) -> float:
        """Count a batch; returns its weight in the running statistics. ``momentum=None`` reads the count, which waits
        for a GPU."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        return self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)


class _ByKernels(torch.autograd.Function):
    """Forward and backward of :class:`SyncBatchNorm` on torch's kernels.

    The forward gathers mean, 1 / deviation and number of samples of all workers, (W, 2 C + 1) float32; the kernel
    merges them by Welford's formula and moves the running statistics. The backward sums two vectors (C,).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float,
        share: float,
    ) -> torch.Tensor:
        input, channels = _dense(input), input.shape[1]
        mean, invstd = torch.batch_norm_stats(input, eps)
        samples = max(share * (input.numel() // channels), NOTHING)
        own = torch.cat([mean, invstd, torch.full((1,), samples, dtype=mean.dtype, device=mean.device)])
        gathered = torch.empty(dist.get_world_size() * own.numel(), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(gathered, own)
        means, invstds, counts = gathered.view(-1, own.numel()).split(channels, 1)
        counts = counts.reshape(-1)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input,
            means,
            invstds,
            running_mean,
            running_var,
            momentum,
            eps,
            counts if running_mean is None else counts.to(running_mean.dtype),
        )
        ctx.save_for_backward(input, weight, mean, invstd, counts.to(torch.int32))
        ctx.share = share
        return torch.batch_norm_elemt(input, weight, bias, mean, invstd, eps)

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call,untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        gradient, channels = _dense(gradient), input.shape[1]
        sum_dy, sum_dy_xmu, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, input, mean, invstd, weight, *ctx.needs_input_grad[:3]
        )
        of_input = None
        if ctx.needs_input_grad[0]:
            both = torch.cat([sum_dy, sum_dy_xmu])
            dist.all_reduce(both)
            weight = None if weight is None else weight.to(mean.dtype)
            of_input = torch.batch_norm_backward_elemt(  # type: ignore[call-arg]
                gradient, input, mean, invstd, weight, *both.split(channels), counts
            )
            if not ctx.share:  # the statistics do not depend on these samples
                of_input.zero_()
        return of_input, of_weight, of_bias, None, None, None, None, None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a memory format that the kernels read."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()]):
        return tensor
    return tensor.contiguous()


def synchronised(model: nn.Module) -> nn.Module:
    """Replace every batch norm of a model by one over the global batch; parameters are kept."""
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _converted(model)
    for name, child in model.named_children():
        setattr(model, name, synchronised(child))
    return model


def _converted(norm: nn.modules.batchnorm._BatchNorm) -> SyncBatchNorm:
    sync = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    sync.weight, sync.bias = norm.weight, norm.bias
    sync.running_mean, sync.running_var = norm.running_mean, norm.running_var
    sync.num_batches_tracked = norm.num_batches_tracked
    sync.training = norm.training
    return sync
