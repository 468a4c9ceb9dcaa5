"""What launchers of several hosts tell each other of workers that do nothing, so that all name the one that holds up
the others."""

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
"""Workers that can do without each other may hang while others work: their launcher waits so much longer, to hear of
others that hang."""


@dataclass(frozen=True)
class Silent:
    """A process that has shown no sign of life for too long.

    Attributes:
        update, since: updates done, and signs of life since the last one.
        stack: the innermost calls of its main thread; empty: it does not even answer; None: it cannot be asked.
        host: how messages call its host; empty: there is only one, or each process is one.
    """

    update: int
    since: int
    stack: list[str] | None
    host: str = ""


class SilentWorkers:
    """The notes of the launchers about their workers.

    Args:
        board: of the run. In a list, because the frames of an error would keep it open.
        size: workers of the run; mine: the ranks of this host's.
        host: how messages call this host.
        apart: workers can do without each other.
    """

    def __init__(self, board: Sequence[Board], size: int, ranks: Sequence[int], host: str, apart: bool) -> None:
        self.board, self.size, self.ranks, self.host, self.apart = board, size, ranks, host, apart
        self.written: dict[int, str] = {}

    def patience_s(self, limit_s: float) -> float:
        """How much longer than the limit this host's workers must be silent to count as those that hang, although
        others work. Workers that cannot do without each other wait for those that work."""
        return min(limit_s, APART_S) if self.apart else float("inf")

    def anybody(self) -> bool:
        """Whether workers of some host have begun, and do nothing."""
        return self.board[0].check([f"{PART}/{BEGUN}"])

    def tell(self, found: Mapping[int, Silent]) -> None:
        """Tell the others of this host's workers, by rank; the rest of them have done their work."""
        if found and not self.written:
            self.board[0].set(f"{PART}/{BEGUN}", "")
        for rank in self.ranks:
            self._set(rank, json.dumps(asdict(found[rank])) if rank in found else AWAY)

    def withdraw(self) -> None:
        """Tell the others that this host's workers work."""
        for rank in self.written:
            self._set(rank, WORKS)

    def everybody(self) -> dict[int, Silent] | None:
        """The workers of all hosts that have not done their work and are not lost, if all of them are silent; else
        None."""
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
