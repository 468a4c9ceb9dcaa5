"""Whether an optimizer updates each parameter by that parameter alone, so that workers can share the parameters out."""

from __future__ import annotations

import torch

from trainer.errors import first_line
from trainer.optim.state_loading import parameters_of, small_copy
from trainer.optim.states import OptimizerState, optimizer_state

SIDE = 2
"""Elements along each dimension of what is tried: one alone hides a factor, such as the rate of LAMB."""
SIZES = (1.0, 1e3, 1e6)
"""Sizes of the gradients of the updates that are tried, so that limits on their norm are met."""


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why workers cannot share out the parameters of an optimizer, as the rest of a sentence; empty: they can.

    Three updates are tried, with all gradients and with those of every second parameter alone.
    """
    try:
        (whole, state), (half, _) = _tried(optimizer, 1), _tried(optimizer, 2)
    except Exception as error:  # a user's optimizer may need more than a gradient
        return f"cannot be tried with a part of the gradients: {first_line(error)}"
    if beside := [*state.others, *state.of_no_parameter]:
        return f"keeps {beside[0]} beside the state of its parameters"
    same = all(torch.equal(a, b) for a, b in zip(whole[::2], half[::2], strict=True))
    return "" if same else "updates a parameter by the gradients of all (a norm of the whole gradient, or the like)"


def _tried(optimizer: torch.optim.Optimizer, every: int) -> tuple[list[torch.Tensor], OptimizerState]:
    """Small parameters after some updates with every n-th gradient, and the state of the optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(SIDE,) * p.dim() for p in parameters_of(optimizer)]
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tried = small_copy(optimizer, parameters)
    for size in SIZES:
        for number, parameter in enumerate(parameters):
            gradient = size * torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if number % every else gradient
        tried.step()
    return [parameter.detach() for parameter in parameters], optimizer_state(tried.state_dict())
