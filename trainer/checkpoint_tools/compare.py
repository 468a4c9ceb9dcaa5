"""``python -m trainer.checkpoints diff``: how two checkpoints differ in position, config and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.checkpoint import store
from trainer.checkpoint_tools.show import position
from trainer.planning.resume_changes import differences
from trainer.terminal.screen import Screen
from trainer.weights import checkpoint_weights


def compared(one: Path, other: Path) -> int:
    """Print how two checkpoints differ in position, config and weights. Returns exit code 0."""
    before, after, screen = store.about(one), store.about(other), Screen()
    screen.print(f"A  {one}\nB  {other}")
    old, new = position(before), position(after)
    rows = [(name, f"{old.get(name)} -> {new.get(name)}") for name in {**old, **new} if old.get(name) != new.get(name)]
    screen.facts("Position", rows or [("the same", "")])
    screen.facts("Config", list(differences(before.config, after.config, False)) or [("the same", "")])
    screen.facts("Model", list(_models(one, other)) or [("the same", "bit by bit")])
    return 0


def _models(one: Path, other: Path) -> Iterator[tuple[str, str]]:
    """For each weight in which two checkpoints differ: its name, and the largest absolute difference or both shapes."""
    old, new = checkpoint_weights.read(one), checkpoint_weights.read(other)
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield name, f"is in {'A' if name in old else 'B'} alone"
        elif old[name].shape != new[name].shape:
            yield name, f"{tuple(old[name].shape)} -> {tuple(new[name].shape)}"
        elif not same(old[name], new[name]):
            yield name, f"{distance(old[name], new[name]):.4g} at most"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and the same values; NaN equals NaN."""
    return (
        one.dtype == other.dtype
        and torch.equal(one.nan_to_num(), other.nan_to_num())
        and torch.equal(one.isnan(), other.isnan())
    )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference between the elements of two tensors of the same shape; 0 for empty tensors."""
    kind = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(kind) - other.to(kind)).abs().max()) if one.numel() else 0.0
