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
