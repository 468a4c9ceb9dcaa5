"""How the trainer's own processes speak with MLflow: what they set before they import it, and the client."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil

from trainer.planning.sqlite_store import address

DRIVER = "sqlite+pysqlite:"
UNFINISHED = ".{}.{}.unfinished"
"""Name of a database that is being made: its name, and the number of the process."""

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the recorder tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # nobody asked a training to tell others; its thread changes os.environ, which breaks requests
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


def settle() -> None:
    """Put these settings into the environment of this process; those that the user has set count."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def client(uri: str) -> Any:
    """Return MLflow's client of a tracking store.

    Of an address that begins with ``sqlite:`` MLflow would make the folders as they are spelled, ``/a%23b`` beside
    ``/a#b``; with the driver's name it does not. The folder is there: ``check_store`` has looked.
    """
    from mlflow import MlflowClient

    if not uri.startswith("sqlite:"):
        return MlflowClient(tracking_uri=uri)
    file = Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0]))
    if not file.exists():
        with contextlib.suppress(OSError):  # MLflow says what is wrong with the place
            _make(file)
    return MlflowClient(tracking_uri=uri.replace("sqlite:", DRIVER, 1))


def _make(file: Path) -> None:
    """Make an MLflow database whole, or not at all.

    MLflow needs some seconds for its many tables. A process that is killed meanwhile would leave a database that MLflow
    takes for one of an older version. So it is made under another name, and gets its own when it is done.
    """
    from mlflow import MlflowClient

    for left in file.parent.glob(UNFINISHED.format(file.name, "*")):
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            left.unlink(missing_ok=True)
    unfinished = file.with_name(UNFINISHED.format(file.name, os.getpid()))
    try:
        MlflowClient(tracking_uri=address(unfinished).replace("sqlite:", DRIVER, 1))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
