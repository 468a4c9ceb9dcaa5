"""Callbacks and a metric with a state, for checkpoints."""

from __future__ import annotations

from typing import Any


class Counting:
    """Counts updates, and remembers the count over lives."""

    def __init__(self, begin: int = 0) -> None:
        self.count = begin

    def on_update_end(self, event: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Another(Counting):
    """A second class of the same state."""
