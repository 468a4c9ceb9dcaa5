"""Counts how often processes of a run have died, and how many restarts are left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from trainer.errors import Died, RunFailed
from trainer.wording import counted

WINDOW_S = 3600.0
"""So many restarts as ``launch.max_restarts`` may be within this time."""


class Deaths:
    """Counts how often processes of the run have died, and allows a limited number of restarts in an hour.

    Args:
        most: so many restarts may be within an hour; clock: in seconds.

    Attributes:
        returned: how workers died that were started again while the others went on.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.times = deque[float]()
        self.before: Died | None = None
        self.returned = list[str]()

    def left(self) -> int:
        """How many restarts are allowed now."""
        while self.times and self.clock() - self.times[0] > WINDOW_S:
            self.times.popleft()
        return self.most - len(self.times)

    def count(self) -> str:
        """Count a restart, of all processes or of one while the others go on; returns which of how many it is, in
        words."""
        self.times.append(self.clock())
        return f"restart {len(self.times)} of {self.most}"

    def restart(self, death: Died) -> str:
        """Allow a restart after this death and return it in words (which of how many).

        Raises:
            RunFailed: it has none.
        """
        most, before = self.most, self.before
        if not most:
            raise death
        if before is not None and (death.who, death.update) == (before.who, before.update):
            why = f"{death.who} died after update {death.update} twice in a row: the run is not started again"
            raise RunFailed(f"{death}\n{why}") from death
        if self.left() <= 0:
            often = f"{counted(most, 'restart')} within an hour (launch.max_restarts): the run is not started again"
            raise RunFailed(f"{death}\nafter {often}") from death
        self.before = death
        return self.count()
