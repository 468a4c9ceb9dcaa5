"""optimizer=torch: any class of torch.optim, by its name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch

from trainer.errors import UserError
from trainer.optim.refused import REFUSED


def names() -> dict[str, type[torch.optim.Optimizer]]:
    """torch.optim's optimizer classes by their names in lower case."""
    base = torch.optim.Optimizer
    found = vars(torch.optim).items()
    return {k.lower(): v for k, v in found if isinstance(v, type) and issubclass(v, base) and v is not base}


def by_name(parameters: list[Any], name: str, **arguments: Any) -> torch.optim.Optimizer:
    """Make ``torch.optim.<name>(parameters, **arguments)``; a weight decay of 0 is left out if the class has none.

    Args:
        parameters: tensors, or parameter groups.

    Raises:
        UserError: torch.optim has no such optimizer (with the nearest name), or it cannot train a model here.
    """
    known = names()
    if why := REFUSED.get(name.lower()):
        raise UserError(f"optimizer.name={name}", *why)
    if name.lower() not in known:
        nearest = [known[near].__name__ for near in difflib.get_close_matches(name.lower(), known, 1)]
        raise UserError(
            f"optimizer.name={name}",
            "torch.optim has no such optimizer",
            f"optimizer.name={nearest[0]}" if nearest else "",
        )
    made = known[name.lower()]
    if not arguments.get("weight_decay") and "weight_decay" not in inspect.signature(made).parameters:
        arguments.pop("weight_decay", None)
    return made(parameters, **arguments)  # type: ignore[call-arg]
