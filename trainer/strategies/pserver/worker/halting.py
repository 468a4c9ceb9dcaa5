"""Stops all workers while the servers save a checkpoint, and lets restarted workers in."""

# A stop, for a checkpoint:
#   working -> drained -> standing -> together -> (servers save) -> working
#   drained: all that was sent is acknowledged. standing: others do not wait for this worker's steps. together: all
#   present workers have met; each knows the greatest step, and who comes back (NEW). Then the first one that has
#   something to save has the servers write, and all meet again.
# Who moves it: each worker by itself, when it finds the first worker's note that asks for a stop. A worker that comes
# back enters at `together`, brings NEW instead of a step, and begins from the checkpoint of this stop.
#
# What must always hold:
# - Nothing is under way while servers save: their parts, and the workers' parts, are of one moment.
# - All workers of a checkpoint stop on the same side of every meeting of the training.
# - If somebody is lost while servers save, the remaining ones save again: the set of workers is that of the last
#   meeting.

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.strategies.lost_workers import is_lost
from trainer.strategies.pserver.protocol.messages import SAVES, STOPS, Message, Verb
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.export import save_checkpoint
from trainer.strategies.seat import Seat

NEW = -1
"""In place of a worker's step: it returns at this stop, and has no step to save."""


class Halting:
    """The part of a pserver worker by which all workers stop together, save and go on.

    Attributes:
        present: ranks of the workers that take part. new: those of them that return at this stop.
    """

    seat: Seat
    client: Client
    present: list[int]
    new: frozenset[int] = frozenset()

    def halt(self, step: int) -> int:
        """Stop together with all other workers; returns the greatest step among them."""
        self.drain()
        self.stand()
        self.client.until(self._is_quiet)
        self.take_in()
        return self._together(step)

    def _is_quiet(self) -> bool:
        """Whether no push or pull is under way."""
        return not any(r.message.verb in (Verb.PULL, Verb.PUSH) for r in self.client.under_way.values())

    def _together(self, step: int) -> int:
        """Wait until all stand still; returns the greatest step of any."""
        steps = np.zeros(self.seat.size)
        steps[self.seat.rank] = step
        met = self._stopped(steps)
        self.new = frozenset(np.flatnonzero(met == NEW).tolist())
        return int(met.max())

    def _stopped(self, values: np.ndarray) -> np.ndarray:
        """The sum (N,) of the values of all present workers, at a meeting at which all stand still.

        The first worker comes after the servers have saved, and after their copies have written the last checkpoint.
        """
        self.client.stops += 1
        return self._met(Message(Verb.MEET, clock=self.client.stops, flags=STOPS | SAVES), values)

    def save_servers(self, folder: Path) -> tuple[int, ...]:
        """Have the servers write their parts; returns the workers whose parts belong to the checkpoint."""
        while True:
            old, count = self._old(), len(self.present)
            if old[0] == self.seat.rank:
                # a returning worker begins from these parts, so they must be complete before all go on
                save_checkpoint(self.client, folder, behind=not self.new)
            self._stopped(np.zeros(1))
            if len(self.present) == count:
                return tuple(old)

    def _old(self) -> list[int]:
        """The ranks of the workers that have a step to save."""
        return [rank for rank in self.present if rank not in self.new]

    # --- a worker that comes back ----------------------------------------------------------------------------------

    def leads(self) -> bool:
        """Whether all workers of lower rank are lost."""
        return all(is_lost(self.seat.store, rank) for rank in self.present if rank < self.seat.rank)

    def admit(self, rank: int, life: int) -> tuple[int, int] | None:
        """Admit a restarted worker at the next stop; returns the numbers of the last meeting and the last stop, or None
        if it is lost again."""
        asks = [self.client.ask(s, Message(Verb.ADMIT, sequence=life, clock=rank)) for s in self.client.servers]
        if not all(answer.clock for answer in self.client.wait(asks)):
            return None
        return self.client.meetings, self.client.stops

    def come_back(self, numbers: tuple[int, int]) -> tuple[int, int] | None:
        """In a restarted worker: take part in the stop at which the others save.
        Returns the number of their checkpoint and the rank that completes it, or None if all others are lost.

        Args:
            numbers: what ``admit`` has returned.
        """
        self.client.meetings, self.client.stops = numbers
        number = self._together(NEW)
        while True:
            count = len(self.present)
            self._stopped(np.zeros(1))
            if len(self.present) == count:
                return (number, self._old()[0]) if self._old() else None

    def pause(self, seconds: float) -> None:
        """Sleep for some seconds, and keep the connections to the servers alive."""
        self.client.pause(seconds)

    def take_part(self) -> None:
        """In a restarted worker: begin to train with the current parameters, at the steps of the slowest worker."""
        self.take_all()
        self.wake(anew=False)

    # --- of the worker ---------------------------------------------------------------------------------------------

    def _met(self, message: Message, values: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until everything that was sent has reached the servers."""
        raise NotImplementedError

    def stand(self) -> None:
        """Take no steps until ``set_out``; workers that wait for the slowest do not wait for this one."""
        raise NotImplementedError

    def take_in(self) -> None:
        """Receive the rows and parameters that were fetched ahead."""
        raise NotImplementedError

    def take_all(self) -> None:
        """Pull all dense parameters as they are now."""
        raise NotImplementedError

    def wake(self, anew: bool) -> None:
        """Take steps again after a stop."""
        raise NotImplementedError
