"""optimizer=torch: any class of torch.optim by its name."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from trainer.errors import UserError


def by_name(parameters: list[torch.Tensor], name: str, **arguments: Any) -> torch.optim.Optimizer:
    """``torch.optim.<name>(parameters, **arguments)``.

    Raises:
        UserError: torch.optim has no such optimizer; with the nearest name.
    """
    known = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type)}
    if name.lower() not in known:
        nearest = [known[near].__name__ for near in difflib.get_close_matches(name.lower(), known, 1)]
        raise UserError(f"optimizer.name={name}", "torch.optim has no such optimizer", f"optimizer.name={nearest[0]}" if nearest else "")  # fmt: skip
    return known[name.lower()](parameters, **arguments)  # type: ignore[no-any-return]
