"""A wait for others, without the time in which this process itself was stopped (SIGSTOP, a debugger, no processor)."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_POLL_S = 3.0
"""Longest time between two polls that counts as waiting: after a longer one, this process itself was stopped."""


class Patience:
    """The rest of a wait. Call :meth:`left` at least every :data:`LONGEST_POLL_S`: a longer gap counts only so much.

    Args:
        seconds: longest wait.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.waited, self._polled = 0.0, clock()

    def left(self) -> float:
        """The seconds that are left; 0 or less: the wait is over."""
        now = self.clock()
        self.waited, self._polled = self.waited + min(now - self._polled, LONGEST_POLL_S), now
        return self.seconds - self.waited
