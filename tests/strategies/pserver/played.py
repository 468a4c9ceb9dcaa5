"""A server and its two workers, message by message, without sockets, clocks and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.notes import Notes
from tests.simulation.scenario import Scenario
from tests.simulation.servers import Run, declared
from trainer.strategies.pserver.protocol.messages import WANTS_DENSE, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.server.machine import CHECK_S, Server
from trainer.strategies.pserver.server.saving import PartWriter

OPTIONS = {"timeout_s": 100.0, "lost_after_s": 10.0, "slice_above": None, "persistables": False}
LIVES = 7, 8
"""Of the two workers."""


class Played:
    """A server and its two workers, without sockets, clocks and processes.

    Args:
        writer: of parts. options: of the strategy.
    """

    def __init__(
        self,
        folder: Path,
        board: Notes,
        life: int = 1,
        resume: str = "",
        writer: PartWriter | None = None,
        **options: float,
    ) -> None:
        told = OPTIONS | options
        scenario = replace(Scenario.drawn(12), mode="async", workers=2, servers=1, options=told, table=False)
        run = Run(scenario, resume)
        run.plan.paths.run_dir = str(folder)  # type: ignore[misc]
        self.now, self.number, self.answers = 0.0, 0, dict[int, Message]()
        self.server = Server(0, run, declared(scenario), self, board, lambda: self.now, 1 << 26, None, life, writer)
        self.incarnations = {0: 0, 1: 0}

    # --- the outlet

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        self.answers[request.number] = answer
        self.answered()

    def answered(self) -> None:
        """An answer has left."""

    def refuse(self, why: BaseException) -> None:
        raise AssertionError(why)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def room_for_files(self) -> Any:
        return nullcontext()

    def counts(self) -> dict[str, Any]:
        return {}

    # --- workers

    def sends(self, rank: int, verb: Verb, *records: Record, **header: int) -> int:
        """A message comes; returns its number."""
        self.number += 1
        incarnation = header.pop("incarnation", self.incarnations[rank])
        message = Message(verb, rank, incarnation, self.number, records=list(records), **header)
        self.server.turn([(b"", message)])
        return self.number

    def asks(self, rank: int, verb: Verb, *records: Record, **header: int) -> Message:
        return self.answers[self.sends(rank, verb, *records, **header)]

    def hello(self, rank: int) -> None:
        answer = self.asks(rank, Verb.HELLO, sequence=LIVES[rank])
        self.incarnations[rank] = answer.incarnation

    def starts(self, *tables: Mapping[str, Any], ranks: Sequence[int] = (0, 1)) -> None:
        """Workers come, and the first one makes the start."""
        for rank in ranks:
            self.hello(rank)
        layout = {"dtype": "float64", "last": True, "pieces": [["p", 0, 6]], "tables": tables}
        self.asks(0, Verb.START, text(layout), Record(Kind.DENSE, np.zeros(6)))

    def pushes(self, rank: int, sequence: int, first: int, after_last: int) -> Message:
        """Batches of block 0, each of which adds 1 to its own element."""
        gradient = np.zeros(6)
        gradient[first:after_last] = -1.0
        work = Record(Kind.WORK, np.array([[0, 0, first, after_last]]))
        numbers = Record(Kind.NUMBERS, np.array([0.0, 1.0, 1.0]))
        return self.asks(
            rank, Verb.PUSH, numbers, Record(Kind.DENSE, gradient), work, sequence=sequence, clock=sequence
        )

    def values(self, rank: int = 0) -> list[float]:
        return list(self.asks(rank, Verb.PULL, flags=WANTS_DENSE).need(Kind.DENSE))

    def later(self) -> None:
        """Some time later it looks around."""
        self.now += 2 * CHECK_S
        self.server.turn([])
