"""A network whose first worker stops with its launcher before it saves the persistables, and wakes when another worker
has saved them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from tests.pace import wait_for
from trainer.models.lenet import LeNet
from trainer.strategies.pserver.protocol import snapshot


class Waking(LeNet):
    """LeNet.

    Args:
        run: the run's folder, absolute. The file ``stopped`` in it has the stopped process; ``awake`` is there when it
            goes on.
    """

    def __init__(self, run: str, **config: Any) -> None:
        super().__init__(**config)
        folder, begin, complete = Path(run), snapshot.begin, snapshot.complete
        launcher = psutil.Process().parents()[1]  # of the forkserver

        def stops(target: Path, rank: int) -> Path:
            if rank == 0:
                (folder / "stopped").write_text(str(os.getpid()))
                launcher.suspend()  # it would end this process
                os.kill(os.getpid(), signal.SIGSTOP)
                try:
                    return begin(target, rank)
                finally:
                    (folder / "awake").touch()
            return begin(target, rank)

        def waits(written: Path, servers: int, target: Path) -> None:
            os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
            wait_for((folder / "awake").exists, 60, "the first worker wakes")
            time.sleep(0.5)
            complete(written, servers, target)
            launcher.resume()

        snapshot.begin, snapshot.complete = stops, waits
