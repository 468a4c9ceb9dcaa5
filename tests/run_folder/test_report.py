"""What a line says of the speed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.run_folder import report as module
from trainer.run_folder.points import Points
from trainer.run_folder.report import Due, Report

FEED = SimpleNamespace(waited=0.0)


class Clock(SimpleNamespace):
    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def updates(report: Report, clock: Clock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        report.progress(0, step)


def line(report: Report, step: int, samples: int) -> None:
    report.training(0, step - 1, step, {"loss": 1.0}, samples, 0.1, Due.now(FEED))


def test_rate_after_a_resume_is_that_of_this_life_alone(tmp_path: Path, monkeypatch: Any) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    before = Report(tmp_path, 100)
    updates(before, clock, range(1, 2), 9.0)
    line(before, 1, 16)
    updates(before, clock, range(2, 10), 0.5)
    state = before.state()
    before.close()
    report = Report(tmp_path, 100, goes_on=True)
    clock.now += 1000.0
    report.load(**state)
    updates(report, clock, range(10, 12), 0.5)  # two of the ten updates of this line are of this life
    line(report, 11, 160)
    updates(report, clock, range(12, 22), 0.5)
    line(report, 21, 160)
    report.close()
    points = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [point["metrics"].get("perf/samples_per_s") for point in points]
    assert rates[0] is None and rates[2] == 32.0
    assert rates[1] == 32.0, "the life before has counted the samples of eight updates, and the time of none"
    assert [point["metrics"].get("perf/step_s") for point in points] == [None, 0.5, 0.5]


def steps(run_dir: Path, name: str) -> list[int]:
    points = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [point["step"] for point in points if name in point["metrics"]]


def test_a_worker_that_takes_over_goes_on_with_the_steps_that_are_there(tmp_path: Path) -> None:
    """Workers without a common step have done other numbers of updates: no curve may run backwards."""
    first, second = Report(tmp_path, 100), Report(None, 100)
    line(first, 5, 16)
    line(first, 9, 16)  # and dies
    second.progress(0, 6)
    second.take_over(tmp_path)
    second.validation(0, 6, {"val/loss": 1.0, "val/acc1": 0.5})
    assert second.watched.step == 9, "the update of the best model is where its point is"
    line(second, 8, 16)
    returned = Report(None, 100)
    returned.load(**second.state())
    returned.progress(0, 10)
    second.hand_over()
    line(second, 13, 16)  # nobody reads it
    returned.take_over(tmp_path)
    line(returned, 12, 16)
    returned.close()
    assert steps(tmp_path, "train/loss") == [5, 9, 11, 13]
    assert steps(tmp_path, "val/loss") == [9]


def test_a_worker_that_is_ahead_tells_its_own_steps(tmp_path: Path) -> None:
    first, second = Report(tmp_path, 100), Report(None, 100)
    line(first, 5, 16)
    second.progress(0, 8)
    second.take_over(tmp_path)
    line(second, 10, 16)
    second.close()
    assert steps(tmp_path, "train/loss") == [5, 10]


def test_a_run_that_goes_on_does_so_behind_the_points_that_stay(tmp_path: Path) -> None:
    """The worker whose points they are was another one."""
    before = Report(tmp_path, 100)
    line(before, 9, 16)
    before.close()
    state = Report(None, 100).state()
    state["kept"]["step"] = 7
    report = Report(tmp_path, 100, goes_on=True)
    report.load(**state)
    line(report, 8, 16)
    report.close()
    assert steps(tmp_path, "train/loss") == [9, 10]


def test_half_a_line_or_another_ones_at_the_end_is_no_step(tmp_path: Path) -> None:
    for there in ("", "no JSON\n", "[]\n", '{"step": 4}\n{"step": 70'):
        (tmp_path / "metrics.jsonl").write_text(there)
        points = Points(tmp_path)
        assert points.last_step == (4 if "4" in there else 0)
        points.close()
