"""Notes between launchers about silent workers, so that all hosts name the worker that holds up the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trainer.host import json_text
from trainer.host.notes_board import Board

BEGUN, WORKS, AWAY = "begun", "", "away"
PART = "silent"
FENCED = "fenced/worker/{}"
APART_S = 30.0
"""Further wait before workers that others can do without count as hanging: the others may hang as well."""


@dataclass(frozen=True)
class Silent:
    """A process that has shown no sign of life for too long.

    Attributes:
        update: updates done. since: signs of life after the last update.
        stack: innermost calls of its main thread; []: it wrote none; None: it cannot be asked.
        host: name of its host in messages; empty: there is one host, or each process counts as a host.
    """

    update: int
    since: int
    stack: list[str] | None
    host: str = ""


class SilentWorkers:
    """The notes of the launchers about their workers.

    Args:
        board: the run's; in a list, because the frames of an error would keep the board open.
        size: number of workers of the run. ranks: the ranks of this host's workers.
        host: name of this host in messages. apart: the run can go on without some of the workers.
    """

    def __init__(self, board: Sequence[Board], size: int, ranks: Sequence[int], host: str, apart: bool) -> None:
        self.board, self.size, self.ranks, self.host, self.apart = board, size, ranks, host, apart
        self.written: dict[int, str] = {}

    def patience_s(self, limit_s: float) -> float:
        """How much longer than the limit this host's workers must be silent to count as hanging while others work.

        Workers that need each other only wait for the others: infinity.
        """
        return min(limit_s, APART_S) if self.apart else float("inf")

    def anybody(self) -> bool:
        """Whether workers of any host have begun, and are silent."""
        return self.board[0].check([f"{PART}/{BEGUN}"])

    def tell(self, found: Mapping[int, Silent]) -> None:
        """Report this host's silent workers, by rank; its other workers have finished."""
        if found and not self.written:
            self.board[0].set(f"{PART}/{BEGUN}", "")
        for rank in self.ranks:
            self._set(rank, json.dumps(asdict(found[rank])) if rank in found else AWAY)

    def withdraw(self) -> None:
        """Report that this host's workers make progress."""
        for rank in self.written:
            self._set(rank, WORKS)

    def everybody(self) -> dict[int, Silent] | None:
        """All unfinished workers that are not lost, by rank, if all of them are silent; else None."""
        found, board = dict[int, Silent](), self.board[0]
        for rank in range(self.size):
            if self.apart and board.check([FENCED.format(rank)]):
                continue
            note = self.written.get(rank, WORKS) if rank in self.ranks else self._get(rank)
            if note == WORKS:
                return None
            if note != AWAY:
                found[rank] = Silent(**json_text.loads(note))
        return found

    def _get(self, rank: int) -> str:
        key = f"{PART}/{rank}"
        return self.board[0].get(key).decode() if self.board[0].check([key]) else WORKS

    def _set(self, rank: int, note: str) -> None:
        if self.written.get(rank, WORKS) != note:
            self.written[rank] = note
            self.board[0].set(f"{PART}/{rank}", note)
