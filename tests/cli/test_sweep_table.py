"""A sweep's table holds every job, also those to which it did not come; its note names the best."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import compose, sweep, sweep_run, sweep_table
from trainer.errors import Interrupted
from trainer.job import plan_table, result
from trainer.job.ready import Ready
from trainer.job.result import Result
from trainer.tracking import logged_model
from trainer.tracking.describe import public, user


def job(value: float | None, *overrides: str, status: str = "done", watched: str = "val/acc1") -> sweep_table.Row:
    best = {} if value is None else {watched: value}
    return sweep_table.Row(
        ("+recipe=x", *overrides), Result(status, "there", "its-run", metrics=best, best=best, seconds=2.0), watched
    )


@pytest.mark.parametrize(
    ("watched", "values", "best"),
    [
        ("val/acc1", [0.1, 0.3, 0.2], 1),
        ("val/loss", [0.1, 0.3, 0.2], 0),
        ("val/rmse", [0.3, None, 0.2], 2),
        ("val/acc1", [None, None, None], None),
        ("val/acc1", [float("nan"), 0.1, 0.1], 1),
    ],
)
def test_the_best_job_goes_by_the_watched_metric(watched: str, values: list[float | None], best: int | None) -> None:
    assert sweep_table.best_of([job(value, f"a={n}", watched=watched) for n, value in enumerate(values)]) == best


def test_jobs_that_go_by_different_metrics_have_no_best() -> None:
    assert sweep_table.best_of([job(1.0), job(0.5, watched="val/auc")]) is None


def test_the_best_of_the_last_life_has_the_highest_step(tmp_path: Path) -> None:
    """MLflow shows the value of the highest step as the latest one."""
    lives = [job(0.1), job(0.2), job(0.3)], [job(0.4), job(0.2), job(0.3)], [job(0.4), job(0.5), job(0.3)]
    for jobs in lives:
        sweep_table.leave_best(jobs, tmp_path)
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [point["metrics"]["val/acc1"] for point in sorted(points, key=lambda p: p["step"])] == [0.3, 0.4, 0.5]
    assert len({point["step"] for point in points}) == 3


def test_an_interrupted_sweep_keeps_what_was_done_and_what_was_not(tmp_path: Path) -> None:
    jobs = [job(0.5, "a=1|2"), job(0.1, "a=3", status="killed"), sweep_table.waiting(["+recipe=x", "a=4"])]
    with sweep_table.write(jobs, tmp_path / "new").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["overrides"], row["status"]) for row in rows] == [
        ("a=1|2", "done"),
        ("a=3", "killed"),
        ("a=4", "not started"),
    ]
    note = sweep_table.note("x", jobs, {"a"}, "python -m trainer ...", tmp_path)
    assert "1 done, 1 killed, 1 not started" in note and "**Best: job 0, `a=1|2`: val/acc1 0.50000**" in note
    assert (
        "| **0** | **a=1\\|2** |" in note
        and len({line.replace("\\|", "").count("|") for line in note.splitlines() if line.startswith("|")}) == 1
    )


def test_what_a_broken_job_left_is_in_the_table(tmp_path: Path) -> None:
    assert result.read_result(str(tmp_path), "failed", "why").error == "why"
    (tmp_path / "result.json").write_text(
        json.dumps({"status": "killed", "run_dir": "d", "seconds": 3.0, "unknown": 1})
    )
    assert result.read_result(str(tmp_path), "failed", "why") == Result("killed", "d", seconds=3.0)


@pytest.mark.parametrize(
    ("best_step", "there", "which", "found"),
    [
        (2, True, "best", ("best", 2, 0.9)),
        (2, True, "last", ("last", 3, 0.5)),
        (0, True, "best", ("last", 3, 0.5)),
        (2, False, "best", ("last", 3, 0.5)),
    ],
)
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
    choice = logged_model.chosen(tmp_path, which, "net")
    assert choice is not None
    assert (choice.which, choice.step, choice.points[0]["metrics"]["val/acc1"]) == found and len(choice.points) == 1
    (tmp_path / "model.json").unlink()
    assert logged_model.chosen(tmp_path, which, "net") is None


def test_names_hold_no_secret_and_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--config-dir", "x=1", "+model.hub_token=abcd", "y=abcd", "tracking.uri=http://me:pw@host"]
    assert [o for o in public(typed, {"abcd"}) if "=" in o] == ["x=1"]

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert user().isdigit()


BEST = {"metric": "val/acc1", "value": 0.95, "step": 22}


def test_an_interrupted_sweep_shows_its_table_and_later_jobs_have_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real sweep of four jobs, of which the third is interrupted; the training itself is left out."""
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def execute(ready: Ready, start: Any, overrides: list[str], tracker: Any, parent: Any) -> Result:
        (plan_table.show_briefly if ready.later else plan_table.show_plan)(ready.plan, "normal")
        ran.append(overrides[-1])
        if len(ran) == 3:
            (Path(ready.plan.paths.run_dir) / "result.json").write_text(
                json.dumps({"status": "killed", "run_dir": "", "seconds": 7.5})
            )
            (Path(ready.plan.paths.run_dir) / "status.json").write_text(json.dumps({"best": BEST}))
            (Path(ready.plan.paths.run_dir) / "checkpoints").mkdir()
            (Path(ready.plan.paths.run_dir) / "checkpoints" / "best.safetensors").touch()
            raise Interrupted("got SIGINT")
        best = {"val/acc1": len(ran) / 10}
        return Result("done", ready.plan.paths.run_dir, metrics=best, best=best, seconds=1.0)

    monkeypatch.setattr(sweep_run, "execute", execute)
    typed = ["+recipe=digits_lenet", "tracking=none", "hydra.sweep.dir=sweep", "optimizer.lr=0.1,0.2,0.3,0.4"]
    with pytest.raises(Interrupted, match="got SIGINT"), compose.hydra_app() as app:
        sweep.sweep(app, typed, "config")
    assert ran == ["optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=0.3"]
    shown = capsys.readouterr().out
    heads = shown.split("--- job ")[1:]
    assert [head.splitlines()[0] for head in heads] == [f"{n} of 4: optimizer.lr=0.{n + 1}" for n in range(3)]
    assert "left      sweep/2  (result.json)" in heads[2] and "left  " not in heads[1]
    assert "best      sweep/2/checkpoints/best.safetensors  (val/acc1 0.95000 at update 22)" in heads[2]
    assert "Plan of digits_lenet" in heads[0] and "Plan" not in heads[1]
    assert len(heads[1].strip().splitlines()) == 2 and "single, 1 worker" in heads[1]
    rows = [line.split() for line in shown.split("Sweep\n")[1].splitlines()[1:5]]
    assert [row[:3] for row in rows[:2]] == [["*1", "optimizer.lr=0.2", "done"], ["0", "optimizer.lr=0.1", "done"]]
    assert [row[1:3] for row in rows[2:3]] == [["optimizer.lr=0.3", "killed"]]
    assert rows[2][-1] == "7.5" and rows[3][1:] == ["optimizer.lr=0.4", "not", "started"]
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 5


def test_best_job_is_a_point_and_each_job_a_link_of_the_sweeps_own_run(tmp_path: Path) -> None:
    jobs = [
        sweep_table.Row(
            (f"optimizer.lr={rate}",),
            Result("done", str(tmp_path), run_id=f"run{number}", experiment_id="7", best={"val/acc1": accuracy}),
            "val/acc1",
        )
        for number, (rate, accuracy) in enumerate(((0.1, 0.5), (0.2, 0.75)))
    ]
    sweep_table.leave_best(jobs, tmp_path)
    [point] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert point["metrics"] == {"val/acc1": 0.75} and point["step"] == 1
    text = sweep_table.note("digits", jobs, ["optimizer.lr"], "python -m trainer -m", tmp_path)
    assert text.splitlines()[0].startswith("**Best: job [1](#/experiments/7/runs/run1)")
    assert "| [0](#/experiments/7/runs/run0) | optimizer.lr=0.1 |" in text
