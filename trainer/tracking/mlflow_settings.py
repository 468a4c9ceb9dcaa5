"""How the trainer's own processes speak with MLflow: what they set before they import it, and the client."""

from __future__ import annotations

import os
from typing import Any

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

    if uri.startswith("sqlite:"):
        uri = uri.replace("sqlite:", "sqlite+pysqlite:", 1)
    return MlflowClient(tracking_uri=uri)
