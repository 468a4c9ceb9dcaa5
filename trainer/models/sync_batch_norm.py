"""Batch norm over the global batch: torch's own on GPUs, an equivalent for Gloo where torch's does not run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce


class GlooSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
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
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def synchronised(model: nn.Module, device: str) -> nn.Module:
    """Replace every batch norm of a model by one over the global batch; parameters are kept."""
    if device.startswith("cuda"):
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _converted(model)
    for name, child in model.named_children():
        setattr(model, name, synchronised(child, device))
    return model


def _converted(norm: nn.modules.batchnorm._BatchNorm) -> GlooSyncBatchNorm:
    sync = GlooSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    sync.weight, sync.bias = norm.weight, norm.bias
    sync.running_mean, sync.running_var = norm.running_mean, norm.running_var
    sync.num_batches_tracked = norm.num_batches_tracked
    sync.training = norm.training
    return sync
