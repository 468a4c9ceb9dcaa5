"""A run that is ended from outside ends whole: no process stays, the run is marked, the exit code tells."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.pace import wait_for
from tests.runs import SMALL, alive, family, mlflow_runs, points, read, start
from trainer.run_folder import tracking_file

SECRET = "s3cret-of-a-hub"
LONG = [
    *SMALL,
    "epochs=100000",
    "checkpoint=none",
    "hydra.run.dir=run",
    "execution.val_every=0",
    "~model.in_channels",
    "~model.image_size",
    "model._target_=tests.e2e.own_models.Talks",
    f"+model.hub_token={SECRET}",
]


@pytest.mark.all
@pytest.mark.parametrize(
    ("how", "nproc"),
    [
        (signal.SIGINT, 2),
        (signal.SIGTERM, 1),
        (signal.SIGKILL, 2),
        *(
            pytest.param(*other, marks=pytest.mark.long)
            for other in ((signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 1))
        ),
    ],
    ids=str,
)
def test_ended_run_leaves_no_process_and_is_marked_killed(tmp_path: Path, how: signal.Signals, nproc: int) -> None:
    process = start(*LONG, f"launch.nproc={nproc}", cwd=tmp_path)
    try:
        run = tmp_path / "run"
        wait_for(lambda: tracking_file.position(run).id, 90, "the MLflow run is opened")
        wait_for(lambda: (run / "metrics.jsonl").exists() and points(run, "train/loss"), 90, "training goes on")
        everybody = family(process.pid)
        assert len(everybody) >= 1 + nproc  # itself, the recorder, and with two workers these and their forkserver
        sent = time.monotonic()
        process.send_signal(how)
        process.wait(15)
        wait_for(lambda: not alive(everybody), 10 - (time.monotonic() - sent), f"{alive(everybody)} end")
    finally:
        process.kill()
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert read(run / "status.json")["state"] == "killed"
    [mlflow_run] = mlflow_runs(tmp_path)
    assert mlflow_run.info.status == "KILLED"
    assert mlflow_run.data.metrics["train/loss"] > 0
    assert "logging in with (hidden)" in (run / "workerlog.0").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "screen.txt"]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert [path for path in files if path.name == "workerlog.0"] != [run / "workerlog.0"], "MLflow has the log as well"
