"""A workaround for bf16 convolutions on CPUs: a kernel leaves gradients unwritten for some strides and paddings.

If a strided convolution's input is so small that one tap of the kernel never meets it (3x3, stride 2, padding 1 on 1x1:
only the middle tap does), oneDNN's bf16 kernel (brgconv_bwd_w, torch 2.15) does not write that tap's gradient, which is
zero. Uninitialised memory then goes into the update, sometimes NaN. Such a convolution is computed in fp32, which is
cheap for a small input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def write_all_gradients(model: nn.Module) -> None:
    """Make the model's strided convolutions compute in fp32 if one of their taps never meets the input."""
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS) and max(module.stride) > 1 and max(module.kernel_size) > 1:
            module.forward = functools.partial(_forward, module, name, set())  # type: ignore[method-assign]


def has_idle_tap(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether a tap of a kernel always lies in the padding, along one dimension of ``size`` elements."""
    positions = range(-padding, size + padding - dilation * (kernel - 1), stride)
    return any(not any(0 <= p + tap * dilation < size for p in positions) for tap in range(kernel))


@functools.lru_cache(maxsize=4096)
def _any_idle(shape: Sequence[int], *geometry: Sequence[int]) -> bool:
    return any(has_idle_tap(*dimension) for dimension in zip(shape, *geometry, strict=True))


def _forward(module: Any, name: str, said: set[Sequence[int]], inputs: torch.Tensor) -> torch.Tensor:
    shape = tuple(inputs.shape[-len(module.stride) :])
    padding = (0,) * len(module.stride) if module.padding == "valid" else module.padding  # no "same" with a stride
    own: Callable[..., torch.Tensor] = type(module).forward
    if not torch.is_autocast_enabled("cpu") or not _any_idle(
        shape, module.kernel_size, module.stride, padding, module.dilation
    ):
        return own(module, inputs)
    if shape not in said:
        said.add(shape)
        print(
            f"{name} is computed in fp32, not in bf16: its input of {'x'.join(map(str, shape))} is smaller than its "
            f"strided kernel, where bf16 kernels of CPUs leave gradients unwritten.",
            flush=True,
        )
    with torch.autocast("cpu", enabled=False):
        return own(module, inputs.float())
