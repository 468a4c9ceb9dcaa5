"""All workers stand still: the servers save for a checkpoint, and a worker that has come back is let in."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.strategies.contract import Seat
from trainer.strategies.pserver.protocol.messages import SAVES, STOPS, Message, Verb
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.export import save_checkpoint
from trainer.strategies.stopping import is_lost

NEW = -1
"""In the place of a worker's step: it has none to save, because it comes back now."""


class Halting:
    """The part of a worker that all modes share by which workers stop together, save and go on.

    Attributes:
        present: ranks of the workers that take part. new: those of them that come back at this very stop.
    """

    seat: Seat
    client: Client
    present: list[int]
    new: frozenset[int] = frozenset()

    def halt(self, step: int) -> int:
        """Stand still with all others; returns the greatest step of any."""
        self.drain()
        self.stand()
        self.client.until(self._is_quiet)
        self.take_in()
        return self._together(step)

    def _is_quiet(self) -> bool:
        """Whether no push or pull is under way. Not to be asked of each request: one that begins anew with a server is forgotten
        when that server is started again once more."""
        return not any(r.message.verb in (Verb.PULL, Verb.PUSH) for r in self.client.under_way.values())

    def _together(self, step: int) -> int:
        """Wait until all stand still; returns the greatest step of any."""
        steps = np.zeros(self.seat.size)
        steps[self.seat.rank] = step
        met = self._stopped(steps)
        self.new = frozenset(np.flatnonzero(met == NEW).tolist())
        return int(met.max())

    def _stopped(self, mine: np.ndarray, flags: int = 0) -> np.ndarray:
        """(N,) the sum of what all present workers bring while all stand still."""
        self.client.stops += 1
        return self._met(Message(Verb.MEET, clock=self.client.stops, flags=STOPS | flags), mine)

    def save_servers(self, folder: Path) -> tuple[int, ...]:
        """Have the servers write their parts; returns the workers whose parts belong to the checkpoint."""
        while True:
            old, count = self._old(), len(self.present)
            if old[0] == self.seat.rank:
                save_checkpoint(self.client, folder)
            self._stopped(np.zeros(1), SAVES)
            if len(self.present) == count:
                return tuple(old)

    def _old(self) -> list[int]:
        """Those that have something to save."""
        return [rank for rank in self.present if rank not in self.new]

    # --- a worker that comes back ----------------------------------------------------------------------------------

    def leads(self) -> bool:
        """Whether this worker is the first of those that are left, as far as is known."""
        return all(is_lost(self.seat.store, rank) for rank in self.present if rank < self.seat.rank)

    def admit(self, rank: int, life: int) -> tuple[int, int] | None:
        """Let a worker in that has come back, for the stop that follows; returns the numbers of the last meeting and of the last
        stop, or None: it is lost again."""
        asks = [self.client.ask(s, Message(Verb.ADMIT, sequence=life, clock=rank)) for s in self.client.servers]
        if not all(answer.clock for answer in self.client.wait(asks)):
            return None
        return self.client.meetings, self.client.stops

    def come_back(self, told: tuple[int, int]) -> tuple[int, int] | None:
        """Take part in the stop at which the others save; returns the number of their checkpoint, and who completes it, or None:
        all others are lost.

        Args:
            told: what ``admit`` has returned.
        """
        self.client.meetings, self.client.stops = told
        number = self._together(NEW)
        while True:
            count = len(self.present)
            self._stopped(np.zeros(1), SAVES)
            if len(self.present) == count:
                return (number, self._old()[0]) if self._old() else None

    def pause(self, seconds: float) -> None:
        """Sleep, and look after the connections to the servers meanwhile."""
        self.client.pause(seconds)

    def take_part(self) -> None:
        """Begin to train: with the parameters as they are now, at the steps of the slowest of the others."""
        self.take_all()
        self.wake(anew=False)

    # --- of the worker ---------------------------------------------------------------------------------------------

    def _met(self, message: Message, mine: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def drain(self) -> None:
        """What is under way to servers has come there."""
        raise NotImplementedError

    def stand(self) -> None:
        """No steps are taken until ``set_out``; who waits for the slowest does not wait for this worker."""
        raise NotImplementedError

    def take_in(self) -> None:
        """What was fetched ahead is received."""
        raise NotImplementedError

    def take_all(self) -> None:
        """Pull all dense parameters as they are now."""
        raise NotImplementedError

    def wake(self, anew: bool) -> None:
        """Take steps again."""
        raise NotImplementedError
