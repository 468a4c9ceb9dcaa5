"""The inputs of a batch: one tensor (N, ...), or a dict of tensors by name, as for click-through data."""

from __future__ import annotations

from collections.abc import Callable

import torch

Inputs = torch.Tensor | dict[str, torch.Tensor]


def each(function: Callable[[torch.Tensor], torch.Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to an input tensor, or to every tensor of a dict of inputs."""
    if isinstance(inputs, torch.Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}


def pinned(batch: tuple[Inputs, torch.Tensor]) -> tuple[Inputs, torch.Tensor]:
    """The batch in page-locked memory. What lies on a device stays there."""
    inputs, labels = batch
    return each(_pinned, inputs), _pinned(labels)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
