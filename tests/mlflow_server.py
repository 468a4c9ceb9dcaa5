"""A real MLflow server that can be killed and started again on the same port and store."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

from tests.pace import wait_for
from tests.ports import ports
from tests.runs import environment, family, kill, zygote
from tests.zygote import Started


class Server:
    """`mlflow server` on 127.0.0.1, its store a SQLite file and its artifacts a folder, both in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        [self.port] = ports(1)
        self.store = f"sqlite:///{folder / 'mlflow.db'}"
        self.process: Started | None = None

    def start(self) -> Server:
        """Start it and wait until it answers."""
        argv = [
            "server",
            "--port",
            str(self.port),
            "--backend-store-uri",
            self.store,
            "--artifacts-destination",
            str(self.folder / "artifacts"),
            "--workers",
            "1",
        ]
        env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        with open(os.devnull, "w") as nowhere:
            self.process = zygote().start(argv, self.folder, env, nowhere.fileno(), nowhere.fileno(), "mlflow")
        wait_for(self.answers, 120, "the MLflow server listens")
        return self

    def answers(self) -> bool:
        """Whether it is there."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started, in whatever they are doing."""
        if self.process is not None:
            kill(reversed(family(self.process.pid)))
            self.process.wait()
            self.process = None
