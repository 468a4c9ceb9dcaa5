"""A batch's inputs: one tensor (N, ...), or several by name, as click-through data have them."""

from __future__ import annotations

from collections.abc import Callable

import torch

Inputs = torch.Tensor | dict[str, torch.Tensor]


def each(function: Callable[[torch.Tensor], torch.Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to an input tensor, or to each tensor of a dict of inputs, under its name."""
    if isinstance(inputs, torch.Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}
