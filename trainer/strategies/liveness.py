"""Finds missing workers: the worker of a collective that has timed out asks, and a thread in each worker answers."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from trainer.host.notes_board import FOREVER, OwnBoard
from trainer.host.patience import Patience

ANSWER_S = 2.0
STORE_S = 3.0
LOOK_S = 0.5
"""Time between two checks, in a wait for answers, whether this process was stopped meanwhile."""


class RollCall:
    """One worker's part in finding missing workers: a thread answers even when the main thread is stuck.

    A worker that only came late must not be named as missing. The errors of the collectives cannot tell the difference.

    Args:
        store: of the group's workers, for this alone.
        rank, size: of this worker in the group.
    """

    def __init__(self, store: OwnBoard, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.meeting = ""
        self._left = False
        self._thread = threading.Thread(target=self._answer, daemon=True, name="roll-call")
        self._thread.start()

    def _answer(self) -> None:
        try:
            own = self.store.clone()
            own.wait([f"call/{self.rank}"], FOREVER)
            if not self._left:
                own.set(f"answer/{self.rank}", self.meeting or "elsewhere")
        except (RuntimeError, dist.DistError):
            pass  # the launcher is gone, and this process follows it

    def missing(self) -> list[int]:
        """After a timeout of a collective: find the workers that are in no collective, or do not answer in two seconds.

        Raises:
            TimeoutError: the store does not answer: its host is gone, or cannot be reached.
            RuntimeError, DistError: the launcher that serves the store is gone.
        """
        found: list[list[int] | Exception] = []

        def ask() -> None:
            try:  # on a connection of its own: a store that does not answer blocks its caller for ever
                found.append(self._ask(self.store.clone()))
            except (RuntimeError, dist.DistError) as error:
                found.append(error)

        asking = threading.Thread(target=ask, daemon=True, name="roll-call-asking")
        asking.start()
        patience = Patience(ANSWER_S + STORE_S, time.monotonic)
        while asking.is_alive() and (left := patience.left()) > 0.0:
            asking.join(min(LOOK_S, left))
        if not found:
            raise TimeoutError("the store does not answer")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _ask(self, store: OwnBoard) -> list[int]:
        for rank in range(self.size):
            store.set(f"call/{rank}", "where are you")
        patience = Patience(ANSWER_S, time.monotonic)
        answers = {rank: f"answer/{rank}" for rank in range(self.size)}
        while patience.left() > 0.0 and not store.check(list(answers.values())):
            time.sleep(0.05)
        return [r for r, key in answers.items() if not store.check([key]) or store.get(key) == b"elsewhere"]

    def end(self) -> None:
        """Stop answering. Workers that ask later wait, so that the error of this one is reported first."""
        self._left = True
        self.store.set(f"call/{self.rank}", "leaving")
        self._thread.join(ANSWER_S)
