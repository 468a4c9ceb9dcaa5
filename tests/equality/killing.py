"""A callback by which a worker dies in the middle of an update, or the run is asked to leave."""

from __future__ import annotations

import os
import signal

from torch import nn

from trainer.worker.callbacks import TrainStart


class Killing:
    """The second worker is killed, or told to leave, before a forward of its first life.

    Args:
        at: which forward of the training, from 0.
        number: of the signal.
    """

    def __init__(self, at: int, number: int = signal.SIGKILL) -> None:
        self.left, self.number = at, number

    def on_train_start(self, event: TrainStart) -> None:
        """Look at each forward."""
        once = event.run_dir / "killed"

        def look(model: nn.Module, inputs: object) -> None:
            self.left -= model.training
            if event.rank == 1 and self.left < 0 and not once.exists():
                once.touch()
                os.kill(os.getpid(), self.number)

        event.model.register_forward_pre_hook(look)
