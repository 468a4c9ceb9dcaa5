"""Optimizers that mix parameters are found before a run whose workers share the parameters out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.optim import Lamb, Lars, Lion
from torch import nn

from trainer.optim.separable import why_not

BY_ITSELF: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        name: lambda parameters, name=name: getattr(torch.optim, name)(parameters, lr=0.1)
        for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Rprop", "ASGD")
    },
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "LARS": lambda parameters: Lars(parameters, lr=0.1, momentum=0.9),
    "LAMB": lambda parameters: Lamb(parameters, max_grad_norm=None),
    "Lion": lambda parameters: Lion(parameters),
}


class Scaled(torch.optim.SGD):
    """Steps by the largest gradient of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        live = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        most = max(p.grad.abs().max() for p in live)
        for parameter in live:
            parameter -= 0.1 * parameter.grad / most


class Slow(torch.optim.SGD):
    """Keeps an average of the parameters beside its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [p.detach().clone() for p in self.param_groups[0]["params"]]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.LayerNorm(2))


@pytest.mark.parametrize("name", BY_ITSELF)
def test_rules_for_each_parameter_are_found(name: str) -> None:
    assert why_not(BY_ITSELF[name](model().parameters())) == ""


def test_muon_takes_whole_matrices() -> None:
    assert why_not(torch.optim.Muon([p for p in model().parameters() if p.dim() == 2])) == ""


@pytest.mark.parametrize("limit", [1.0, 1000.0])
def test_a_norm_of_the_whole_gradient_is_found(limit: float) -> None:
    assert "by the gradients of all" in why_not(Lamb(model().parameters(), max_grad_norm=limit))


def test_rules_of_ones_own_are_found() -> None:
    assert "by the gradients of all" in why_not(Scaled(model().parameters(), lr=0.1))
    assert why_not(Slow(model().parameters(), lr=0.1)) == "keeps slow beside the state of its parameters"
