"""A launcher in a process of its own, to be killed: ``python -m tests.launch.parent FOLDER [deaf]``."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.errors import Interrupted
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.started_process import Role

if __name__ == "__main__":
    folder, deaf = Path(sys.argv[1]), "deaf" in sys.argv
    role = Role("worker", 2, "tests.launch.entries:works_for_long", ["cpu", "cpu"])
    try:
        launch([role], {"folder": str(folder), "deaf": deaf, "fails": False}, folder / "logs", Rendezvous())
    except Interrupted as error:
        print(f"interrupted: {error}", flush=True)
        sys.exit(130)
