"""A callback that fills the disk of the run's folder, and makes room again."""

from __future__ import annotations

import errno
import os

from trainer.worker.callbacks import UpdateEnd

FILLER = "filler"


class Filler:
    """Between two updates of the first worker the disk has no room.

    Args:
        at: the update after which the disk is full. until: the one after which it is not.
    """

    def __init__(self, at: int, until: int) -> None:
        self.at, self.until = at, until
        self.fills = os.environ.get("RANK", "0") == "0"

    def on_update_end(self, event: UpdateEnd) -> None:
        filler = event.run_dir / FILLER
        if (
            self.fills and self.at <= event.step < self.until
        ):  # again and again: a checkpoint that is given up leaves room
            with filler.open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        elif self.fills and event.step == self.until:
            filler.unlink()
