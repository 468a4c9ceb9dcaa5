"""optimizer=schedule_free: no schedule of the learning rate, an average of the steps instead.

The Road Less Scheduled (Defazio et al., 2024, arXiv:2405.15682). There are three sequences of weights:

    z   where plain steps lead to, in the optimizer's state
    x   the average of all z, weighted by squared rates: validated, saved and exported
    y   (1 - beta) z + beta x: where gradients are computed, in the model while it trains

x follows from y and z. In :meth:`ScheduleFree.eval` it takes the place of y, which is kept. So the training goes on to
the bit after :meth:`ScheduleFree.train`. The authors' library (schedulefree 1.4.1 of March 2025, the last one) computes
y again, so that each validation rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.host.sharded import local

TRAINED, STEPPED, SQUARES = "y", "z", "exp_avg_sq"


class ScheduleFree(torch.optim.Optimizer):
    """Base class: the steps of z, and the average.

    Args:
        beta: share of x in y.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, beta: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "updates": 0, "weight_sum": 0.0})
        self.beta = beta

    def directions(self, live: Sequence[torch.Tensor], updates: int) -> list[torch.Tensor]:
        """The direction of each parameter's step from its gradient, without decay.

        Args:
            updates: number of this update, from 1.
        """
        return [local(p.grad).clone() for p in live if p.grad is not None]

    def rate(self, lr: float, updates: int) -> float:
        """The rate of an update, from the schedule's."""
        return lr

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            live = [p for p in group.get("params", ()) if p.grad is not None]
            updates = group.get("updates", 0) + 1
            rate = self.rate(group.get("lr", 0.0), updates)
            total = group.get("weight_sum", 0.0) + rate**2
            group.update(updates=updates, weight_sum=total)
            if live and total:
                self._step(live, updates, rate, rate**2 / total, group.get("weight_decay", 0.0))
        return loss

    def _step(self, live: list[torch.Tensor], updates: int, rate: float, share: float, decay: float) -> None:
        for p in live:
            if STEPPED not in self.state[p]:
                self.state[p][STEPPED] = p.detach().clone()
        y, z = [local(p) for p in live], [local(self.state[p][STEPPED]) for p in live]
        steps = self.directions(live, updates)
        if decay:
            torch._foreach_add_(steps, y, alpha=decay)
        # y' = (1 - beta) z' + beta x', with x' = (1 - share) x + share z' and z' = z - rate * steps
        torch._foreach_lerp_(y, z, share)
        torch._foreach_add_(y, steps, alpha=rate * (self.beta * (1 - share) - 1))
        torch._foreach_sub_(z, steps, alpha=rate)

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the model, and keep y."""
        for p, state in self.state.items():
            if STEPPED in state and TRAINED not in state:
                state[TRAINED] = p.detach().clone()
                local(p).lerp_(local(state[STEPPED]), 1 - 1 / self.beta)

    @torch.no_grad()
    def train(self) -> None:
        """Put y back into the model."""
        for p, state in self.state.items():
            if TRAINED in state:
                local(p).copy_(local(state.pop(TRAINED)))


class ScheduleFreeSgd(ScheduleFree):
    """Schedule-free SGD (equations 1 to 3 of the paper), with decay at y."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, lr, weight_decay, beta)


class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW (algorithm 1 of the paper), and its lazy counterpart for tables.

    Args:
        betas: share of x in y, and decay of the running mean of the squared gradient.
    """

    of_tables = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 0.0025,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas[0])
        self.beta2, self.eps = betas[1], eps

    def rate(self, lr: float, updates: int) -> float:
        return float(lr * (1 - self.beta2**updates) ** 0.5)

    def directions(self, live: Sequence[torch.Tensor], updates: int) -> list[torch.Tensor]:
        gradients = [local(p.grad) for p in live if p.grad is not None]
        for p in live:
            if SQUARES not in self.state[p]:
                self.state[p][SQUARES] = torch.zeros_like(p)
        squares = [local(self.state[p][SQUARES]) for p in live]
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - self.beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, self.eps)
        return list(torch._foreach_div(gradients, roots))
