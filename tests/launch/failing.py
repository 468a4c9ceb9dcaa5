"""A launch whose workers fail, in a process of its own: ``python -m tests.launch.failing FOLDER [looks]``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.errors import RunFailed
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.started_process import Role
from trainer.strategies.seat import Seat


def exits(seat: Seat, payload: Any) -> None:
    """Worker 1 ends without an error of its own."""
    if seat.rank == 1:
        os._exit(7)
    seat.store.wait(["never"])


def raises(seat: Seat, payload: Any) -> None:
    """All fail with a secret in the error."""
    raise ValueError("a secret of the model")


def looks(seat: Seat, payload: Any) -> tuple[str, list[str]]:
    """Where temporary files go, and the modes of all folders in the common one."""
    common = Path(payload)
    return tempfile.gettempdir(), [oct(path.stat().st_mode) for path in common.iterdir()]


if __name__ == "__main__":
    for name in sys.argv[2:] or ["exits", "raises"]:
        role = Role("worker", 2, f"tests.launch.failing:{name}", ["cpu", "cpu"])
        try:
            results = launch([role], os.environ.get("TMPDIR"), Path(sys.argv[1]), Rendezvous())
            print("own", results.of["worker"][0][0], flush=True)
            print("modes", *results.of["worker"][0][1], flush=True)
        except RunFailed as error:
            print(error, flush=True)
