"""A sweep that goes on is one run of MLflow over its jobs, each of which is checked against its own checkpoints."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.runs import mlflow_runs, trainer

TYPED = (
    "-m",
    "+recipe=digits_lenet",
    "epochs=1",
    "limit_train_batches=4",
    "limit_val_batches=1",
    "execution.threads=1",
    "checkpoint.every_steps=2",
    "checkpoint.background=false",
    "tracking.log_model=false",
    "tracking.system_every_s=null",
    "hydra.sweep.dir=sweep",
)
LRS, AUTO = "optimizer.lr=0.1,0.05", "resume=auto"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of two jobs that has come to its end; no test changes it."""
    folder = tmp_path_factory.mktemp("swept")
    done = trainer(*TYPED, LRS, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def cut(swept: Path, tmp_path: Path) -> Path:
    """The same, whose second job left nothing."""
    shutil.copytree(swept, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "sweep" / "1")
    return tmp_path / "cut"


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())


def parent_of(run: Any) -> str | None:
    return run.data.tags.get("mlflow.parentRunId")  # type: ignore[no-any-return]


@pytest.mark.all
def test_all_jobs_of_both_lives_are_under_one_run(tmp_path: Path) -> None:
    trainer(*TYPED, LRS, cwd=tmp_path)
    before = mlflow_runs(tmp_path)
    [parent] = [run for run in before if parent_of(run) is None]
    shutil.rmtree(tmp_path / "sweep" / "1")
    done = trainer(*TYPED, LRS, AUTO, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    now = mlflow_runs(tmp_path)
    assert [run.info.run_id for run in now if parent_of(run) is None] == [parent.info.run_id]
    assert {parent_of(run) for run in now} == {None, parent.info.run_id}
    assert len(now) == len(before) + 1 == 4, "job 0 goes on in its run, and job 1 begins in a new one"
    assert [run.data.tags["trainer.run_dir"] for run in now if parent_of(run) is None] == [str(tmp_path / "sweep")]
    assert {run.info.status for run in now} == {"FINISHED"}


@pytest.mark.all
def test_a_fresh_sweep_in_the_same_folder_shows_its_own_best(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept / "sweep", tmp_path / "sweep")
    done = trainer(*TYPED, "optimizer.lr=0.00001,0.00002", "resume=fresh", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [parent] = [run for run in mlflow_runs(tmp_path) if parent_of(run) is None]
    with (tmp_path / "sweep" / "sweep.csv").open() as table:
        best = max(float(row["best val/acc1"]) for row in csv.DictReader(table))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    points = [point.value for point in client.get_metric_history(parent.info.run_id, "val/acc1")]
    assert points == [pytest.approx(best, abs=1e-4)]


@pytest.mark.all
def test_each_job_is_looked_for_in_its_own_folder(cut: Path) -> None:
    shown = words(trainer(*TYPED, LRS, AUTO, "plan=true", cwd=cut))
    assert "sweep/checkpoints" not in shown and f"there is no checkpoint in {cut}/sweep/1/checkpoints" in shown
    assert shown.count("resumes checkpoints/step-000000004 after update 4 of 4") == 1


@pytest.mark.all
def test_a_job_that_cannot_go_on_is_refused_before_the_first_one_starts(swept: Path) -> None:
    before = files(swept / "sweep")
    done = trainer(*TYPED, "optimizer.lr=0.1,0.07", AUTO, cwd=swept)
    assert done.returncode == 2 and "resume in job 1 (optimizer.lr=0.07): the config differs" in done.stderr
    assert "optimizer.lr was 0.05, is 0.07" in done.stderr and files(swept / "sweep") == before


def test_folders_of_jobs_may_have_names_of_the_users_own(swept: Path, tmp_path: Path) -> None:
    named = "hydra.sweep.subdir=${hydra.job.num}-${optimizer.lr}"
    for number, lr in enumerate((0.1, 0.05)):
        shutil.copytree(swept / "sweep" / str(number), tmp_path / "sweep" / f"{number}-{lr}")
    planned = trainer(*TYPED, LRS, AUTO, named, "plan=true", cwd=tmp_path)
    assert words(planned).count("resumes checkpoints/step-000000004 after update 4 of 4") == 2, planned.stdout
