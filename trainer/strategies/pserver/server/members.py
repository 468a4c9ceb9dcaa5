"""The workers as one server sees them: lives, watermarks of pushes, and who is gone."""

# States of a worker, as one server sees it:
#   expected -> present -> left            expected: no HELLO yet; it counts as present, and others wait for it.
#                       -> lost -> coming -> present
# Who moves it: HELLO (present; coming, with the flag COMES), ADMIT (coming -> present), BYE or the launcher's note that
# its process ended well (left), `Liveness.lose` (lost).
#
# What must always hold:
# - A life is named by a random number, the same at all servers. A fenced life never takes part again.
# - An incarnation counts the lives that this server has heard of, so servers may differ. A message of another
#   incarnation than the present one is answered FAILED, fenced.
# - A watermark says which pushes are done, as a number and a set above it: messages overtake each other.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainer.strategies.pserver.protocol.messages import Malformed

AHEAD = 100_000
"""Most numbers by which a push may be ahead of all that are done before it; no client has so many under way."""

MOST_LIVES = 10_000


class Watermark:
    """Which pushes of a worker are done: sequence numbers up to ``done``, and those ``above`` that came out of
    order."""

    def __init__(self, done: int = 0, above: Iterable[int] = ()) -> None:
        self.done = done
        self.above = set(above)

    def seen(self, sequence: int) -> bool:
        """Whether the push of that number is done already."""
        return sequence <= self.done or sequence in self.above

    @property
    def greatest(self) -> int:
        """The greatest number of a push that is done."""
        return max(self.above, default=self.done)

    def check(self, sequence: int) -> None:
        """Refuse a push whose number cannot be.

        Raises:
            Malformed: no client can be that far, or it is none.
        """
        if sequence < 1:
            raise Malformed("a push without a number")
        if sequence > self.done + AHEAD:
            raise Malformed(f"push {sequence} after {self.done}")

    def begin(self, sequence: int) -> None:
        """Begin a life after the push of that number; pushes that are missing up to there never come.

        Raises:
            Malformed: no life before has come that far.
        """
        if sequence > self.done + AHEAD:
            raise Malformed(f"a life that begins after push {sequence}, where {self.done} are done")
        if sequence > self.done:
            self.done = sequence
            self.above = {number for number in self.above if number > sequence}
            self._close_gap()

    def mark(self, sequence: int) -> None:
        """Note that the push of that number is done."""
        self.above.add(sequence)
        self._close_gap()

    def _close_gap(self) -> None:
        while self.done + 1 in self.above:
            self.done += 1
            self.above.remove(self.done)


@dataclass(slots=True)
class Member:
    """One worker as a server sees it: its lives (random numbers), its fenced lives, its watermark, when it was heard
    last, and how it ended, if it did. ``coming``: it is back, and not admitted yet."""

    rank: int
    lives: list[int] = field(default_factory=list)
    fenced: set[int] = field(default_factory=set)
    watermark: Watermark = field(default_factory=Watermark)
    heard: float = 0.0
    left: bool = False
    lost: str = ""
    coming: bool = False

    @property
    def incarnation(self) -> int:
        """Number of a worker's present life at this server, from 1; 0 before the first. Servers may count
        differently: one may never have heard of a life."""
        return len(self.lives)

    @property
    def life(self) -> int:
        """The number of a worker's present life, the same at all servers; 0 before the first."""
        return self.lives[-1] if self.lives else 0

    @property
    def present(self) -> bool:
        """Whether the worker has not left and is not lost; it may not have come yet."""
        return not (self.left or self.lost or self.coming)


class Members:
    """All workers of the run, as one server sees them.

    Args:
        size: how many there are.
        lost_after_s: silence after which one that has come is to be ended, and counts as lost soon.
        now: the clock.
    """

    def __init__(self, size: int, lost_after_s: float, now: Callable[[], float]) -> None:
        self.all = [Member(rank, heard=now()) for rank in range(size)]
        self.lost_after_s = lost_after_s
        self.now = now

    def present(self) -> list[int]:
        """Ranks of the workers that are present."""
        return [m.rank for m in self.all if m.present]

    def hello(self, rank: int, life: int, coming: bool = False) -> Member:
        """Note that a worker starts, or says so again; a new life takes the place of the one before.

        Args:
            coming: it does not take part before it is let in.
        """
        member = self.all[rank]
        if life not in member.lives:
            if len(member.lives) >= MOST_LIVES:
                raise Malformed(f"worker {rank} in its life number {MOST_LIVES + 1}")
            member.lives.append(life)
            member.left, member.lost, member.coming = False, "", coming
        member.heard = self.now()
        return member

    def heard(self, rank: int) -> None:
        """Note that a message came from that worker."""
        self.all[rank].heard = self.now()

    def away(self, seconds: float) -> None:
        """Add the seconds in which the server was busy or stopped and heard nobody; those are not silence of a
        worker."""
        for member in self.all:
            member.heard += seconds

    def over(self, rank: int, life: int) -> bool:
        """Whether messages of that life of a worker are refused: another has begun, or it was declared lost."""
        member = self.all[rank]
        return life in member.fenced or life in member.lives[:-1]

    def why_refused(self, rank: int, incarnation: int) -> str:
        """Why a message of that life of a worker is refused; empty: it is accepted."""
        member = self.all[rank]
        if incarnation != member.incarnation:
            return f"worker {rank} was started again; this is its life number {incarnation} of {member.incarnation}"
        if member.life in member.fenced:
            return f"worker {rank} was declared lost ({member.lost or 'another worker has taken over its work'})"
        return ""

    def fence(self, rank: int, life: int) -> None:
        """Refuse all later messages of that life of a worker, whether this server has heard of it or not."""
        fenced = self.all[rank].fenced
        if len(fenced) >= MOST_LIVES:
            raise Malformed(f"worker {rank} has {MOST_LIVES} lives that are over")
        fenced.add(life)

    def lose(self, rank: int, why: str) -> None:
        """Declare a worker lost: later messages of its present life are refused."""
        member = self.all[rank]
        member.lost = why
        member.fenced.add(member.life)

    def silent(self, besides_s: float = 0.0) -> list[int]:
        """Ranks of present workers that have not been heard for too long, and so many seconds besides."""
        limit = self.now() - self.lost_after_s - besides_s
        return [m.rank for m in self.all if m.heard < limit and m.present and m.life]


def workers(ranks: Iterable[int]) -> str:
    """The members of these ranks by name in a message: ``worker 1, worker 3``."""
    return ", ".join(f"worker {rank}" for rank in sorted(ranks))
