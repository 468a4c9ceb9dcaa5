"""One update of the parameters: unscale, clip, learning rate of this step, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.optim.sparse import clip_norm


class Updater:
    """An optimizer with its learning-rate schedule, gradient clipping and fp16 loss scale.

    Args:
        optimizer: its parameter groups' ``lr`` is what the schedule multiplies.
        factor: the schedule, update number -> factor.
        clip_norm: greatest L2 norm of the whole gradient, that of sparse tables included, or None.
        loss_scaling: dynamic loss scaling, for fp16: an update with an inf or nan gradient is skipped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        clip_norm: float | None = None,
        loss_scaling: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.clip_norm = clip_norm
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        device = self.parameters[0].device.type if self.parameters else "cpu"
        self.scaler = torch.amp.GradScaler(device) if loss_scaling else None
        self.steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update, of the first parameter group."""
        return self.base_lrs[0] * self.factor(self.steps)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self) -> None:
        """Apply the gradients and drop them. Skipped by the loss scaler, the schedule goes on all the same."""
        if self.scaler is not None and self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        factor = self.factor(self.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _clip(self, limit: float) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self.parameters):
            clip_norm(self.parameters, limit)
        else:
            nn.utils.clip_grad_norm_(self.parameters, limit)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, number of updates, loss scale."""
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "scaler": scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
