"""A callback at which workers wait for the test: a run ends neither before something has happened to it nor long after."""

from __future__ import annotations

import time

from trainer.worker.callbacks import UpdateEnd


class Gate:
    """After its update ``at``, a worker goes on when the run's folder has the file ``until``."""

    def __init__(self, at: int, until: str) -> None:
        self.at, self.until = at, until

    def on_update_end(self, event: UpdateEnd) -> None:
        while event.step == self.at and not (event.run_dir / self.until).exists():
            time.sleep(0.02)
