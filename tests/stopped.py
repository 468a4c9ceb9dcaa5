"""The clock of a process that is stopped in the middle of a wait, while others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class StoppedClock:
    """In the place of the module ``time``.

    Attributes:
        stop_s: the first sleep takes so much longer. at: by time, what others do then. They were stopped, too, or wait
        for this process: time of the stop does not count.
    """

    stop_s: float
    at: dict[float, Callable[[], None]] = field(default_factory=dict)
    slept: float = 0.0

    def monotonic(self) -> float:
        """The time, which went on in the stop."""
        return self.slept + (self.stop_s if self.slept else 0.0)

    def sleep(self, seconds: float) -> None:
        """Time goes on, and others do what they do meanwhile."""
        self.slept += seconds
        for when in [when for when in self.at if when <= self.slept]:
            self.at.pop(when)()

    def time_ns(self) -> int:
        """As :func:`time.time_ns`."""
        return time.time_ns()
