"""What a line says of the speed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.run_folder import report as module
from trainer.run_folder.report import Report

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
    report.training(0, step - 1, step, {"loss": 1.0}, samples, 0.1, FEED)


@pytest.mark.parametrize("older", [False, True])
def test_rate_after_a_resume_is_that_of_this_life_alone(tmp_path: Path, monkeypatch: Any, older: bool) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    before = Report(tmp_path, 100)
    updates(before, clock, range(1, 2), 9.0)
    line(before, 1, 16)
    updates(before, clock, range(2, 10), 0.5)
    state = before.state()
    before.close()
    if older:
        del state["kept"]["told"]

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
    assert older or rates[1] == 32.0, "the life before has counted the samples of eight updates, and the time of none"
    assert [point["metrics"].get("perf/step_s") for point in points] == [None, 0.5, 0.5]
