"""Optimizers and schedules of torch.optim that cannot train a model here, and what to type instead. This module imports
no torch: the command line reads it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.keys import spelled

REFUSED: Mapping[str, tuple[str, str]] = {
    "lbfgs": (
        "evaluates the loss several times in each update, which one batch after the other does not allow",
        "optimizer=adam",
    ),
    "sparseadam": ("takes sparse gradients alone", "optimizer.name=Adam optimizer.sparse=adam"),
}
"""Name in lower case -> why the optimizer is refused, and what to type instead."""

SCHEDULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "StepLR": ("step", {"step_size": "every_epochs", "gamma": "gamma"}),
    "MultiStepLR": ("multistep", {"milestones": "milestones", "gamma": "gamma"}),
    "ExponentialLR": ("step scheduler.every_epochs=1", {"gamma": "gamma"}),
    "CosineAnnealingLR": ("cosine", {}),
    "PolynomialLR": ("polynomial", {"power": "power"}),
    "OneCycleLR": ("one_cycle", {"pct_start": "rise"}),
    "ReduceLROnPlateau": ("plateau", {"factor": "gamma", "patience": "patience", "cooldown": "cooldown"}),
    "LinearLR": ("constant", {"total_iters": "warmup_steps", "start_factor": "warmup_start"}),
}
"""Our option for each schedule of torch.optim.lr_scheduler, and our keys for its arguments."""
TORCHS = "torch.optim.lr_scheduler."


def option_for(node: Mapping[str, Any]) -> str:
    """The option in place of a ``scheduler`` node of torch's; empty: there is none."""
    option, keys = SCHEDULES.get(str(node.get("_target_")).removeprefix(TORCHS), ("", {}))
    values = [f"scheduler.{own}={spelled(node[name])}" for name, own in keys.items() if name in node]
    return (
        " ".join([f"scheduler={option}", *values])
        if option
        else "a class of your own with factor(step) (docs/adding.md)"
    )
