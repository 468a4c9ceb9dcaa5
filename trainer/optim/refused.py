"""Optimizers of torch.optim that cannot train a model here. This module imports no torch: the command line reads it, too."""

from __future__ import annotations

from collections.abc import Mapping

REFUSED: Mapping[str, tuple[str, str]] = {
    "lbfgs": ("evaluates the loss several times in each update, which one batch after the other does not allow", "optimizer=adam"),
    "sparseadam": ("takes sparse gradients alone", "optimizer.name=Adam optimizer.sparse=adam"),
}  # fmt: skip
"""Why, and what to type instead, by the name in lower case."""
