"""Notes by which a restarted worker asks to be let in while the others go on, and the answers of the others."""

from __future__ import annotations

from trainer.host.notes_board import Board
from trainer.strategies.lost_workers import Readmits

COMES = "comes"
LET_IN = "lets-in/{}/{}"
NOT_WRITTEN = "not-written/{}"


class Returned:
    """Requests of restarted workers, as the other workers see them.

    Args:
        board: where workers leave notes about checkpoints.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.known: set[tuple[int, int]] = set()
        """Ranks and lives that have been answered."""

    def waits(self) -> bool:
        """Whether a restarted worker may be waiting."""
        return bool(self.board.check([COMES])) and self._asking() not in self.known

    def let_in(self, strategy: Readmits, asked: int) -> None:
        """Let in the waiting worker, if there is one. It takes part from the checkpoint that this worker asks for."""
        if not self.waits():
            return
        rank, life = self._asking()
        self.known.add((rank, life))
        if (answer := strategy.admit(rank, life)) is not None:
            self.board.set(LET_IN.format(rank, life), " ".join(map(str, (asked, *answer))))
            print(f"worker {rank} has come back and takes part from the next checkpoint on", flush=True)

    def _asking(self) -> tuple[int, int]:
        rank, life = self.board.get(COMES).decode().split()
        return int(rank), int(life)
