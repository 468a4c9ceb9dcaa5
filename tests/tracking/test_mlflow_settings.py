"""What MLflow does in the trainer's processes, as it reads it."""

from __future__ import annotations

import pytest
from mlflow import environment_variables as read_by_mlflow

from trainer.tracking.mlflow_settings import SETTINGS, settle


def test_mlflow_s_usage_statistics_are_sent_only_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "of before")  # which is put back
        monkeypatch.delenv(name)
    settle()
    assert read_by_mlflow.MLFLOW_DISABLE_TELEMETRY.get() is True
    assert read_by_mlflow.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 0
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    settle()
    assert read_by_mlflow.MLFLOW_DISABLE_TELEMETRY.get() is False
