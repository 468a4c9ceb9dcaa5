"""What the trainer's own processes that speak with MLflow set before they import it."""

from __future__ import annotations

import os

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the recorder tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nobody asked a training to tell others; its thread changes os.environ, which breaks requests
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


def settle() -> None:
    """Put these settings into the environment of this process; those that the user has set count."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
