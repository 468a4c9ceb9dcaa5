"""A wait for others, without the time in which this process itself was stopped (SIGSTOP, a debugger, no processor)."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_LOOK_S = 3.0
"""So much time at most counts between two looks: this process may have been stopped, and is no measure of the
others."""


class Patience:
    """How much is left of a wait. Ask at least as often as :data:`LONGEST_LOOK_S`: of more time between two looks no
    more counts.

    Args:
        seconds: longest wait.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.waited, self._looked = 0.0, clock()

    def left(self) -> float:
        """The seconds that are left; 0 or less: no patience is."""
        now = self.clock()
        self.waited, self._looked = self.waited + min(now - self._looked, LONGEST_LOOK_S), now
        return self.seconds - self.waited
