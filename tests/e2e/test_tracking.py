"""Every point reaches MLflow once, also through a server that is away; runs say what they were."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import SMALL, environment, mlflow_runs, points, read, trainer, wait_for
from trainer.tracking.recorder import Follower


def test_mlflow_holds_every_point_parameter_tag_and_artifact(tmp_path: Path) -> None:
    done = trainer(*SMALL, "hydra.run.dir=run", "+tracking.tags.team=vision", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = mlflow_runs(tmp_path)
    result = read(tmp_path / "run" / "result.json")
    assert run.info.status == "FINISHED"
    assert run.info.run_id == result["run_id"]
    assert run.data.params["optimizer.lr"] == "0.05"
    assert run.data.params["data.batch_size"] == "32"
    tags = run.data.tags
    assert tags["trainer.strategy"] == "single"
    assert tags["trainer.world_size"] == "1"
    assert tags["trainer.data_source"] == "scikit-learn's handwritten digits"
    assert tags["trainer.stand_in"] == "no"
    assert tags["team"] == "vision"
    assert "trainer.torch" in tags and "trainer.device" in tags
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.name == "digits_lenet"
    for name in ("train/loss", "train/acc1", "val/loss", "val/acc5", "perf/samples_per_s", "perf/data_wait", "lr"):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted(m.value for m in history) == sorted(points(tmp_path / "run", name)), name
    assert {"config.yaml", "plan.json", "workerlog.0", "curves.png"} <= {
        a.path for a in client.list_artifacts(run.info.run_id)
    }


def test_git_commit_and_dirty_are_tags(tmp_path: Path) -> None:
    from trainer.tracking import describe

    assert "mlflow.source.git.commit" in describe.git() or not (Path.cwd() / ".git").exists()
    assert describe.flat({"a": {"api_key": "x", "b": 1}}) == [("a.api_key", "(hidden)"), ("a.b", 1)]


def test_sweep_runs_are_children_of_one_parent(tmp_path: Path) -> None:
    done = trainer("-m", *SMALL, "data.batch_size=16,32,64", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = mlflow_runs(tmp_path)
    [parent] = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    children = [r for r in runs if r is not parent]
    assert {c.data.tags["mlflow.parentRunId"] for c in children} == {parent.info.run_id}
    assert {c.data.params["data.batch_size"] for c in children} == {"16", "32", "64"}
    assert {r.info.status for r in runs} == {"FINISHED"}
    for number in range(3):
        assert read(tmp_path / "sweep" / str(number) / "result.json")["status"] == "done"
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 4
    assert "data.batch_size=64" in done.stdout.split("Sweep")[-1]


def test_training_goes_on_without_the_tracking_server_and_points_are_sent_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    done = trainer(
        *SMALL, "hydra.run.dir=run", f"tracking.uri={uri}", "tracking.flush_timeout_s=1", "epochs=3", cwd=tmp_path
    )
    run_dir = tmp_path / "run"
    assert done.returncode == 0, done.stderr
    assert "the tracking server does not answer" in done.stdout
    assert "recorder resend" in done.stdout
    assert read(run_dir / "result.json")["run_id"] is None
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: _answers(port), 60, "the MLflow server listens")
        resent = subprocess.run(
            [sys.executable, "-m", "trainer.tracking.recorder", "resend", str(run_dir)],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert resent.returncode == 0, resent.stdout + resent.stderr
    finally:
        import os
        import signal

        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    [run] = mlflow_runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/acc1"] == pytest.approx(points(run_dir, "val/acc1")[-1])


def _answers(port: int) -> bool:
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class _FlakyClient:
    """A tracking server that fails on chosen calls, before or after it has stored what it was sent."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        self.calls = 0
        self.stored: set[tuple[str, float, int, int]] = set()
        self.batches: list[int] = []

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls += 1
        failure = self.failures.get(self.calls)
        if failure == "before":
            raise ConnectionError("away")
        self.batches.append(len(metrics))
        self.stored |= {(m.key, m.value, m.timestamp, m.step) for m in metrics}
        if failure == "after":
            raise ConnectionError("reply lost")


@pytest.mark.parametrize("failures", [{}, {1: "before"}, {2: "after"}, {1: "before", 2: "after", 3: "before"}])
def test_points_survive_failures_of_the_server(tmp_path: Path, failures: dict[int, str]) -> None:
    client = _FlakyClient(failures)
    run = {"uri": "", "experiment": "e", "params": {}}
    follower = Follower(tmp_path, run, run_id="r", described=True, client=client)
    written = set()
    with (tmp_path / "metrics.jsonl").open("w", buffering=1) as file:
        for step in range(2500):
            file.write(json.dumps({"time": step, "step": step, "epoch": 0, "metrics": {"a": step * 0.5}}) + "\n")
            written.add(("a", step * 0.5, step, step))
            if step % 700 == 0:
                follower.retry_at = 0.0
                follower.try_once()
        file.write('{"time": 1, "half a li')
    for _ in range(5):
        follower.retry_at = 0.0
        follower.try_once()
    assert client.stored == written
    assert max(client.batches) <= 1000
    assert follower.sent == (tmp_path / "metrics.jsonl").read_text().rindex("\n") + 1
