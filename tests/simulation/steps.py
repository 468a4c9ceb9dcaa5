"""The steps of a server in sync, counted a second time: which pieces each of them has, and of whom it is the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.world import Violation
from trainer.strategies.pserver.protocol.messages import Kind, Message

if TYPE_CHECKING:
    from tests.simulation.servers import SimulatedServer

MINUS_NOTHING = 0x8000
"""-0.0 as bfloat16."""


def pieces_of(push: Message) -> list[int]:
    """The pieces of a push that names none: those of which it has a gradient, or a difference."""
    dense = push.first(Kind.DENSE)
    if dense is None:
        return []
    there = abs(dense) > 0.01 if dense.dtype.kind == "f" else (dense != 0) & (dense != MINUS_NOTHING)
    return np.flatnonzero(there).tolist()


class Steps:
    """What each step has changed at a server. A step is the mean over the workers whose pushes are in it.

    Attributes:
        counted: (pieces,) how many steps have had each piece, those before a checkpoint included. promised: by step,
            pieces of pushes that were answered before it.
    """

    def __init__(self, server: SimulatedServer) -> None:
        scenario = server.scenario
        self.server, self.counted = server, np.zeros(scenario.batches * scenario.epochs)
        self.before: np.ndarray | None = None
        self.promised: dict[int, set[int]] = {}

    def look(self, vector: np.ndarray, version: int) -> None:
        """The parameters have another version.

        Raises:
            Violation: a piece is there twice, with another weight than it must have, or is missing.
        """
        if self.before is None:
            self.before = vector.copy() if self.server.resume else np.zeros_like(vector)
            if self.server.resume:
                self.counted[vector > 0.01] = 1.0
                return
        change = vector - self.before
        self.before = vector.copy()
        pieces = np.flatnonzero(np.abs(change) > 1e-9)
        self.counted[pieces] += 1.0
        self._check(pieces, change[pieces], version)

    def _check(self, pieces: np.ndarray, values: np.ndarray, version: int) -> None:
        server, scenario = self.server, self.server.scenario
        most = self.counted[pieces]
        if server.unsure:
            most = most[~np.isin(pieces, server.unsure)]
        if most.max(initial=0.0) > 1:
            twice = [p for p in pieces.tolist() if self.counted[p] > 1 and p not in server.unsure]
            raise Violation(f"{server.name} has applied piece {twice[0]} {self.counted[twice[0]]:g} times")
        ranks = {*(pieces % scenario.batches // scenario.each).tolist()}
        if len(pieces) != len(ranks) * scenario.merge or abs(values * len(ranks) - 1.0).max(initial=0.0) > 1e-6:
            raise Violation(
                f"{server.name}: step {version} of workers {sorted(ranks)} changes pieces {pieces.tolist()} "
                f"by {values.tolist()}"
            )
        if missing := {*server.machine.members.present()} - ranks:
            raise Violation(f"{server.name}: step {version} goes without worker {min(missing)}")
        self._check_promises(version)

    def answered(self, push: Message) -> None:
        """A push is acknowledged. Its step is done, or will have it.

        Raises:
            Violation: it is done without it.
        """
        self.promised.setdefault(push.clock, set()).update(pieces_of(push))
        self._check_promises(self.server.machine.parameters.version)

    def _check_promises(self, version: int) -> None:
        for step in [step for step in self.promised if step <= version]:
            if lost := [piece for piece in self.promised.pop(step) if not self.counted[piece]]:
                raise Violation(f"{self.server.name} has acknowledged piece {lost[0]}, and step {step} goes without it")

    def check_end(self) -> None:
        """What must be so at the end.

        Raises:
            Violation: a push was acknowledged, and its step never came.
        """
        if self.promised:
            raise Violation(
                f"{self.server.name} has acknowledged a push of step {min(self.promised)}, and never done that"
            )
