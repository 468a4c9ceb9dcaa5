"""A sweep's table holds every job, also those to which it did not come; its note names the best."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from trainer import sweeps
from trainer.job import Result
from trainer.tracking import model
from trainer.tracking.describe import public, user


def job(value: float | None, *overrides: str, status: str = "done", watched: str = "val/acc1") -> sweeps.Job:
    best = {} if value is None else {watched: value}
    return sweeps.Job(("+recipe=x", *overrides), Result(status, "there", "its-run", best, best, seconds=2.0), watched)


@pytest.mark.parametrize(
    ("watched", "values", "best"),
    [
        ("val/acc1", [0.1, 0.3, 0.2], 1), ("val/loss", [0.1, 0.3, 0.2], 0), ("val/rmse", [0.3, None, 0.2], 2),
        ("val/acc1", [None, None, None], None), ("val/acc1", [float("nan"), 0.1, 0.1], 1),
    ],
)  # fmt: skip
def test_the_best_job_goes_by_the_watched_metric(watched: str, values: list[float | None], best: int | None) -> None:
    assert sweeps.best_of([job(value, f"a={n}", watched=watched) for n, value in enumerate(values)]) == best


def test_jobs_that_go_by_different_metrics_have_no_best() -> None:
    assert sweeps.best_of([job(1.0), job(0.5, watched="val/auc")]) is None


def test_an_interrupted_sweep_keeps_what_was_done_and_what_was_not(tmp_path: Path) -> None:
    jobs = [job(0.5, "a=1|2"), job(0.1, "a=3", status="killed"), sweeps.waiting(["+recipe=x", "a=4"])]
    with sweeps.write(jobs, tmp_path / "new").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["overrides"], row["status"]) for row in rows] == [("a=1|2", "done"), ("a=3", "killed"), ("a=4", "not started")]  # fmt: skip
    note = sweeps.note("x", jobs, {"a"}, "python -m trainer ...", tmp_path)
    assert "1 done, 1 killed, 1 not started" in note and "**Best: job 0, `a=1|2`: val/acc1 0.50000**" in note
    assert "| **0** | **a=1\\|2** |" in note and len({line.replace("\\|", "").count("|") for line in note.splitlines() if line.startswith("|")}) == 1  # fmt: skip


def test_what_a_broken_job_left_is_in_the_table(tmp_path: Path) -> None:
    assert sweeps.left(str(tmp_path), "failed", "why").error == "why"
    (tmp_path / "result.json").write_text(
        json.dumps({"status": "killed", "run_dir": "d", "seconds": 3.0, "unknown": 1})
    )
    assert sweeps.left(str(tmp_path), "failed", "why") == Result("killed", "d", seconds=3.0)


@pytest.mark.parametrize(
    ("best_step", "there", "which", "found"),
    [
        (2, True, "best", ("best", 2, 0.9)), (2, True, "last", ("last", 3, 0.5)), (0, True, "best", ("last", 3, 0.5)),
        (2, False, "best", ("last", 3, 0.5)),
    ],
)  # fmt: skip
def test_the_best_model_is_logged_where_there_is_one(
    best_step: int, there: bool, which: str, found: tuple[str, int, float], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in (
        "model.json",
        "example.npz",
        "model.safetensors",
        *(["checkpoints/best.safetensors"] if there else []),
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "result.json").write_text(json.dumps({"best_step": best_step, "steps": 3}))
    told = [(1, {"train/loss": 1.0}), (2, {"val/acc1": 0.9}), (3, {"train/loss": 1.0}), (3, {"val/acc1": 0.5})]
    lines = [json.dumps({"time": 0, "step": step, "epoch": 0, "metrics": metrics}) for step, metrics in told]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    choice = model.chosen(tmp_path, which, "net")
    assert choice is not None
    assert (choice.which, choice.step, choice.points[0]["metrics"]["val/acc1"]) == found and len(choice.points) == 1
    (tmp_path / "model.json").unlink()
    assert model.chosen(tmp_path, which, "net") is None


def test_names_hold_no_secret_and_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--config-dir", "x=1", "+model.hub_token=abcd", "y=abcd", "tracking.uri=http://me:pw@host"]
    assert [o for o in public(typed, {"abcd"}) if "=" in o] == ["x=1"]

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert user().isdigit()
