"""Servers whose copies write their parts when the test lets them. Real processes, started by the command line with
``strategy._target_=tests.faults.slow_disk.Async``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainer.checkpoint import streamed
from trainer.host.files import replace_file
from trainer.strategies import builtin
from trainer.strategies.pserver.server import server
from trainer.strategies.seat import Seat

HELD = "held.{}.{}"
"""In the run's folder: the process that is about to write the part of that server, of the checkpoint of that name."""
GO = "go"
"""In the run's folder: copies need not wait; with the name of a checkpoint behind it (``go.step-...``), those of that
one."""


def serve(seat: Seat, run: Any) -> dict[str, Any]:
    """As a server's own entry."""
    folder, write = Path(run.plan.paths.run_dir), streamed.write

    def slowly(path: Path, *arguments: Any) -> None:
        name = path.parent.name.partition(".")[0]
        replace_file(folder / HELD.format(seat.rank, name), str(os.getpid()))
        while not ((folder / GO).exists() or (folder / f"{GO}.{name}").exists()):
            time.sleep(0.02)
        write(path, *arguments)

    streamed.write = slowly
    return server.serve(seat, run)


class Async(builtin.PserverAsyncDeclaration):
    """As strategy=pserver_async."""

    entries = {"server": "tests.faults.slow_disk:serve"}


class Sync(builtin.PserverSyncDeclaration):
    """As strategy=pserver_sync."""

    entries = {"server": "tests.faults.slow_disk:serve"}


class Geo(builtin.PserverGeoDeclaration):
    """As strategy=pserver_geo."""

    entries = {"server": "tests.faults.slow_disk:serve"}
