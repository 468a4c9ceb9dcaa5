"""A callback at which workers wait for the test: a run ends neither before something has happened to it nor long
after."""

from __future__ import annotations

import os
import time

from trainer.worker.callbacks import TrainStart, UpdateEnd

WAITS = "waits at the gate"
"""What a worker's log says then."""


class Gate:
    """After its update ``at``, a worker goes on when the run's folder has the file ``until``.

    Args:
        rank: of the worker that waits; None: all do.
    """

    def __init__(self, at: int, until: str, rank: int | None = None) -> None:
        self.at, self.until = at, until
        self.waits = rank is None or os.environ.get("RANK", "0") == str(rank)

    def on_update_end(self, event: UpdateEnd) -> None:
        if self.waits and event.step == self.at:
            print(WAITS, flush=True)
        while self.waits and event.step == self.at and not (event.run_dir / self.until).exists():
            time.sleep(0.02)


class Late:
    """A worker begins its first update when the run's folder has the file ``until``."""

    def __init__(self, until: str) -> None:
        self.until = until

    def on_train_start(self, event: TrainStart) -> None:
        print(WAITS, flush=True)
        while not (event.run_dir / self.until).exists():
            time.sleep(0.02)


class Slow:
    """Each update takes so long at least.

    Args:
        until: while the run's folder has no file of that name.
    """

    def __init__(self, seconds: float, until: str = "") -> None:
        self.seconds, self.until = seconds, until

    def on_update_end(self, event: UpdateEnd) -> None:
        if not self.until or not (event.run_dir / self.until).exists():
            time.sleep(self.seconds)
