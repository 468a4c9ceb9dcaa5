"""optimizer=torch: any class of torch.optim by its name."""

from __future__ import annotations

import difflib
from typing import Any

import torch


def by_name(parameters: list[torch.Tensor], name: str, **arguments: Any) -> torch.optim.Optimizer:
    """``torch.optim.<name>(parameters, **arguments)``.

    Raises:
        ValueError: torch.optim has no such optimizer; with the nearest name.
    """
    known = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type)}
    if name.lower() not in known:
        nearest = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; optimizer.name={known[nearest[0]].__name__}?" if nearest else ""
        raise ValueError(f"torch.optim has no {name!r}{hint}")
    return known[name.lower()](parameters, **arguments)  # type: ignore[no-any-return]
