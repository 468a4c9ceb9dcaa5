"""A network whose first worker dies while it saves: a process cannot be killed at a point from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from trainer.models.lenet import LeNet
from trainer.strategies.pserver.protocol import snapshot


class Dying(LeNet):
    """LeNet; who comes to that point first is killed there, and nobody after it.

    Args:
        at: ``persistables``: all servers have saved, and they are not complete; ``model``: they are, and the model is
            about to be written.
        run: the run's folder, absolute.
    """

    def __init__(self, at: str, run: str, **config: Any) -> None:
        super().__init__(**config)
        self.at, self.run, complete = at, Path(run), snapshot.complete

        def dies(*arguments: Any) -> None:
            self.die_once()
            complete(*arguments)

        if at == "persistables":
            snapshot.complete = dies

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.at == "model" and (self.run / "checkpoints" / "persistables").is_dir():
            self.die_once()
        return super().state_dict(*arguments, **options)

    def die_once(self) -> None:
        """Of the processes of the run, the first that calls it."""
        try:
            (self.run / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
