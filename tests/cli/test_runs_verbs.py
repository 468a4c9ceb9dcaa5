"""``runs list | compare | reproduce | prune | report`` on folders as runs leave them."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path

import pytest

from tests.runs import SMALL, trainer
from trainer.cli import runs_verbs, sweep_report
from trainer.errors import UserError
from trainer.run_folder.folder_lock import FolderLock


def made(folder: Path, state: str, value: float = 0.5, words: str = "", days: float = 30.0) -> Path:
    """A run's folder with its status of some days ago."""
    folder.mkdir(parents=True)
    best = {"metric": "val/acc1", "value": value, "step": 10}
    (folder / "status.json").write_text(json.dumps({"state": state, "best": best}))
    (folder / "result.json").write_text(json.dumps({"status": state, "best": {"val/acc1": value}, "seconds": 1.0}))
    (folder / "plan.json").write_text(json.dumps({"objective": {"best": "val/acc1"}, "batches": {"update_size": 8}}))
    (folder / "config.yaml").write_text(f"optimizer: {{lr: {value}}}\nepochs: 1\n")
    life = {"number": 1, "began": "", "command": f"+recipe=digits_lenet {words}"}
    (folder / "lives.json").write_text(json.dumps([life]))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "metrics": {"val/acc1": value}}) + "\n")
    (folder / ".lock").touch(mode=0o600)
    then = time.time() - days * 86_400
    os.utime(folder / "status.json", (then, then))
    return folder


def test_prune_deletes_what_it_lists_only_with_yes_and_never_a_living_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    old, fresh = made(Path("outputs/old"), "failed"), made(Path("outputs/fresh"), "failed", days=1)
    done, dead = made(Path("outputs/done"), "done"), made(Path("outputs/dead"), "running")
    living = made(Path("outputs/living"), "running")
    hold = FolderLock(living)
    assert hold.share()
    try:
        assert runs_verbs.answer(["prune"]) == 0
        listed = capsys.readouterr().out
        assert "outputs/old" in listed and "outputs/dead" in listed and "nothing is" in listed
        assert all(run.exists() for run in (old, fresh, done, dead, living))
        assert runs_verbs.answer(["prune", "--yes"]) == 0
        assert [run.exists() for run in (old, fresh, done, dead, living)] == [False, True, True, False, True]
    finally:
        hold.leave()


def test_a_run_of_which_a_process_takes_the_lock_after_the_list_stays(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed")
    (saved,) = runs_verbs.found([str(tmp_path)])
    hold = FolderLock(run)
    assert hold.share()
    try:
        assert not runs_verbs._delete(saved) and run.exists()
    finally:
        hold.leave()


def test_list_and_compare_show_states_and_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made(tmp_path / "one", "done", 0.25), made(tmp_path / "other", "running", 0.75)
    runs_verbs.answer(["list", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any("one" in line and "done" in line and "30 d" in line for line in lines)
    assert any("other" in line and "lost" in line for line in lines)
    runs_verbs.answer(["compare", str(one), str(other)])
    shown = capsys.readouterr().out
    assert re.search(r"optimizer.lr +0.25 +0.75", shown) and "epochs" not in shown
    assert re.search(r"best val/acc1 +0.25 +0.75 +\+0.5", shown)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "needs one of"),
        ("lst", "needs one of"),
        ("compare here", "required"),
        ("reproduce here", "no run's folder"),
        ("prune --older -3", "-3: must be a number of at least 0"),
        ("prune --older nan", "nan: must be a number of at least 0"),
    ],
)
def test_wrong_words_are_a_sentence(typed: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        runs_verbs.answer(typed.split())


@pytest.mark.all
def test_a_run_on_the_cpu_is_reproduced_exactly(tmp_path: Path) -> None:
    first = trainer(*SMALL, "tracking=none", "hydra.run.dir=run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = trainer("runs", "reproduce", "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "code: the same" in again.stdout and "versions: the same" in again.stdout
    assert "the difference is exactly 0" in again.stdout
    path = tmp_path / "run-again" / "metrics.jsonl"
    assert path.is_file()
    points = [json.loads(line) for line in path.read_text().splitlines()]
    points[0]["metrics"]["train/loss"] += 0.5
    path.write_text("".join(json.dumps(point) + "\n" for point in points))
    said = list(runs_verbs.differences(tmp_path / "run", tmp_path / "run-again"))
    assert "first train/loss" in said[-1] and said[-1].endswith("the largest difference is 0.5")


def test_a_report_is_one_file_with_the_best_job_first(tmp_path: Path) -> None:
    for number, (rate, value) in enumerate(((0.1, 0.5), (0.2, 0.9), (0.3, 0.7))):
        made(tmp_path / str(number), "done", value, f"optimizer.lr={rate} model=m{number}<b>")
    page = sweep_report.report(tmp_path).read_text()
    assert page.index("<td>1 (best)</td>") < page.index("<td>2</td>") < page.index("<td>0</td>")
    assert "optimizer.lr=0.2" in page.partition("<pre>")[2].partition("</pre>")[0]
    assert not re.search(r"https?://|<script|src=|<b>", page)
    assert page.count("<svg") == 3  # no rates, so no throughput


def test_only_swept_keys_are_axes_of_a_report_and_log_ranges_are_logarithmic(tmp_path: Path) -> None:
    """``resume=auto`` is a word of some jobs only after sweep.resume; sweep.parallel may differ between commands."""
    rates = [10.0**-n for n in (4, 3, 2, 1)]
    for number, rate in enumerate(rates):
        words = f"optimizer.lr={rate} seed={number}" + " resume=auto sweep.parallel=2" * (number == 3)
        made(tmp_path / str(number), "done", 0.5 + rate, words)
    sweep_report.write_axes(tmp_path, {"optimizer.lr", "seed"}, ["optimizer.lr=log 0.0001..0.1", "seed=0..3"])
    jobs, keys = sweep_report.found(tmp_path)
    assert keys == {"optimizer.lr": True, "seed": False}
    page = sweep_report.report(tmp_path).read_text()
    assert "optimizer.lr (log)" in page and "seed (log)" not in page and ">resume<" not in page
    axes, (lr, *_) = sweep_report.coordinates(jobs, keys)
    assert axes["optimizer.lr (log)"] == ["0.0001", "0.003162", "0.1"]
    assert sorted(lr) == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(("most", "scale"), [(7.0, " (log)"), (2.0, "")])
def test_an_axis_over_more_than_two_decades_is_logarithmic(tmp_path: Path, most: float, scale: str) -> None:
    for number in range(8):
        made(tmp_path / str(number), "done", 0.5 + number / 100, f"loss.scale={10 ** (number * most / 7)}")
    axes, _ = sweep_report.coordinates(*sweep_report.found(tmp_path))
    assert next(iter(axes)) == f"loss.scale{scale}"


def test_ranks_and_importance_are_those_of_their_definitions() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    rates, values = rng.permutation(20) / 10, rng.normal(size=20)
    jobs = [
        sweep_report.Job(
            str(n), "done", [f"lr={rate}", f"kind={'ab'[n % 2]}"], "val/acc1", float(value), {}, 1.0, [], None, None
        )
        for n, (rate, value) in enumerate(zip(rates, values, strict=True))
    ]
    found = sweep_report.importance(jobs, ["lr", "kind"])
    goal = values.argsort().argsort() + 1.0
    assert math.isclose(found["lr"], abs(np.corrcoef(rates.argsort().argsort(), goal)[0, 1]))
    means = [goal[n::2].mean() for n in (0, 1)]
    between = sum(10 * (mean - goal.mean()) ** 2 for mean in means)
    assert math.isclose(found["kind"], between / ((goal - goal.mean()) ** 2).sum())
    assert sweep_report.ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
