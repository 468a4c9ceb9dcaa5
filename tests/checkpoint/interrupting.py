"""A callback by which a run breaks, dies or is asked to leave, in the middle of an update or of a validation."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter

from torch import nn

from trainer.worker.callbacks import TrainStart

AT = "interrupt"
"""The file, in the folder of the run's folder, that tells what happens: ``breaks``, ``dies`` or ``leaves``, the rank,
``training`` or ``validation``, and before which forward of that kind, from 0. It is removed when that happens."""


class Interrupting:
    """Looks at each forward of its worker's model, in the first life."""

    def __init__(self) -> None:
        self.forwards = Counter[str]()

    def on_train_start(self, event: TrainStart) -> None:
        place, rank = event.run_dir.parent / AT, event.rank

        def look(model: nn.Module, inputs: object) -> None:
            doing = "training" if model.training else "validation"
            number = self.forwards[doing]
            self.forwards[doing] += 1
            with contextlib.suppress(FileNotFoundError):
                how, *where = place.read_text().split()
                if where == [str(rank), doing, str(number)]:
                    place.unlink()
                    if how == "breaks":
                        raise RuntimeError("broken by the test")
                    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGUSR1)

        event.model.register_forward_pre_hook(look)
