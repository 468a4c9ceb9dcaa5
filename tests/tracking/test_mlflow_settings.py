"""What MLflow does in the trainer's processes, as it reads it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from mlflow import environment_variables as read_by_mlflow

from trainer.planning.sqlite_store import address
from trainer.tracking import mlflow_settings
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


def test_a_database_that_a_killed_process_was_making_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of MLflow's tables would be taken for a database of an older version."""
    file, made = tmp_path / "a b#.db", list[str]()

    def client(tracking_uri: str) -> str:
        path = Path(unquote(tracking_uri.removeprefix("sqlite+pysqlite:///")))
        made.append(path.name)
        assert path.exists() or path != file, "MLflow itself would make it"
        if path != file:
            path.write_text("half" if len(made) == 1 else "whole")
        if len(made) == 1:
            raise KeyboardInterrupt
        return path.read_text()

    monkeypatch.setattr("mlflow.MlflowClient", client)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # the process is killed
    with pytest.raises(KeyboardInterrupt):
        mlflow_settings.client(address(file))
    monkeypatch.undo()
    monkeypatch.setattr("mlflow.MlflowClient", client)
    (left,) = tmp_path.iterdir()
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    left.rename(tmp_path / mlflow_settings.UNFINISHED.format(file.name, ended.pid))
    assert mlflow_settings.client(address(file)) == "whole"
    assert [*tmp_path.iterdir()] == [file]
