"""mode=lr_find and mode=scaling: what they find, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests import pace
from tests.cli.conftest import Run
from tests.runs import start, trainer
from trainer.cli.scaling import Measured
from trainer.job import lr_range
from trainer.optim.schedules import Exponential
from trainer.terminal.status import read_status

REFUSED = {
    "mode=lr_find strategy=pserver_async launch.nproc=2": ("parameter servers", "strategy=collective"),
    "mode=lr_find strategy=pserver_sync launch.nproc=2": ("parameter servers", "strategy=collective"),
    "mode=lr_find lr_find.last=1e-9": ("is not above lr_find.first", "lr_find.last=0.001"),
    "mode=lr_find resume=auto": ("fresh parameters", "the command without it"),
    "mode=scaling": ("needs numbers of workers", "mode=scaling launch.nproc=1,2,4"),
    "mode=scaling launch.nproc=two": ("needs numbers of workers", "mode=scaling launch.nproc=1,2,4"),
    "mode=scaling launch.nproc=1,2 launch.nnodes=2": ("the workers of one host", "launch.nnodes=1"),
    "mode=scaling strategy=advise launch.nproc=1,2": ("measures one strategy", "without mode=scaling"),
    "-m mode=scaling launch.nproc=1,2": ("no job of a sweep", "mode=scaling without -m"),
    "-m mode=lr_find optimizer=sgd,adam": ("no job of a sweep", "mode=lr_find without -m"),
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_a_finder_cannot_do_is_a_sentence_with_what_to_type(run: Run, folder: Path, typed: str) -> None:
    code, _, error = run("+recipe=digits_lenet", *typed.split())
    assert code == 2
    assert all(part in error for part in REFUSED[typed])
    assert not list(folder.iterdir())


def test_the_exponential_schedule_multiplies_by_one_factor_up_to_its_end() -> None:
    schedule = Exponential(total_steps=101, steps_per_epoch=10, final=1e4)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 1 and math.isclose(factors[-1], 1e4)
    assert all(math.isclose(b / a, 10 ** (4 / 100)) for a, b in pairwise(factors))


def test_the_suggestion_is_the_steepest_place_of_a_known_curve() -> None:
    rates = [10 ** (-6 + n / 100) for n in range(601)]
    losses = [2.0 / (1 + math.exp(8 * (math.log10(rate) + 3))) for rate in rates]  # steepest at 1e-3
    curve = lr_range.found(rates, losses)
    assert curve.steepest is not None
    assert 1e-3 < curve.rates[curve.steepest] < 1.5e-3  # smoothing comes a few updates late
    assert lr_range.found(rates, [1.0 + n for n in range(601)]).steepest is None


def test_efficiency_is_by_the_smallest_number_of_workers() -> None:
    row = Measured(workers=4, rate=300.0, apart=400.0, base=(2, 200.0))
    assert (row.speed_up, row.efficiency, row.allowed, row.communication) == (3.0, 0.75, 1.0, 0.25)


def test_a_range_test_prints_the_override_to_type_and_saves_no_checkpoint(tmp_path: Path) -> None:
    ended = trainer("+recipe=digits_lenet", "mode=lr_find", "hydra.run.dir=found", cwd=tmp_path, pictures=True)
    assert ended.returncode == 0, ended.stderr
    said = next(line for line in ended.stdout.splitlines() if line.startswith("suggestion: optimizer.lr="))
    assert 1e-3 < float(said.partition("=")[2]) < 1.0  # a rate of 0.05 trains this recipe
    assert (tmp_path / "found" / "lr_find.png").stat().st_size > 10_000
    assert not list((tmp_path / "found" / "checkpoints").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found"], "it changes no config, and tracks nothing"
    points = [json.loads(line) for line in (tmp_path / "found" / "metrics.jsonl").read_text().splitlines()]
    rates = [point["metrics"]["lr"] for point in points if "lr" in point["metrics"]]
    assert math.isclose(rates[0], 1e-6) and rates == sorted(rates)


SCALING = ("+recipe=digits_lenet", "mode=scaling", "execution.threads=1", "hydra.run.dir=scaled")


def test_scaling_measures_each_number_of_workers_and_writes_what_it_prints(tmp_path: Path) -> None:
    ended = trainer(*SCALING, "launch.nproc=2,1", "scaling.updates=12", cwd=tmp_path, pictures=True)
    assert ended.returncode == 0, ended.stderr
    one, two = json.loads((tmp_path / "scaled" / "scaling.json").read_text())
    assert (one["workers"], two["workers"], one["speed_up"], one["samples_per_s_apart"]) == (1, 2, 1.0, None)
    assert math.isclose(two["speed_up"], two["samples_per_s"] / one["samples_per_s"])
    assert math.isclose(two["efficiency"], two["speed_up"] / 2) and 0 <= two["communication"] < 1
    rows = [line.split() for line in ended.stdout.splitlines() if re.match(r"[12] +\d", line)]
    for row, found in zip(rows, (one, two), strict=True):
        shown = [f"{found[name]:.{digits}f}" for name, digits in (("samples_per_s", 1), ("speed_up", 2))]
        assert row[1:3] == shown, ended.stdout
    assert (tmp_path / "scaled" / "scaling.png").stat().st_size > 10_000
    parts = {path.parent.name: read_status(path.parent, "plan.json") for path in tmp_path.glob("scaled/*/plan.json")}
    assert {name: plan["topology"]["roles"]["worker"] for name, plan in parts.items()} == {"1": 1, "2": 2, "2-apart": 2}
    updates = {name: json.loads(path.read_text().splitlines()[-1])["step"] for name, path in points(tmp_path)}
    assert updates == {"1": 12, "2": 12, "2-apart": 12}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_a_signal_to_a_scaling_ends_its_training_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = start(*SCALING, "launch.nproc=2", "scaling.updates=1000000", cwd=tmp_path)
    try:
        pace.wait_for(lambda: any(path.stat().st_size for _, path in points(tmp_path)), 120, "two workers train")
        trains = [one for one in psutil.Process(command.pid).children(recursive=True) if one.is_running()]
        assert len(trains) >= 3
        os.kill(command.pid, number)
        assert command.wait(60) == code
    finally:
        command.kill()
    pace.wait_for(lambda: not any(lives(one) for one in trains), 30, "no process is left")
    assert "the training that ran has ended" in (tmp_path / "screen.txt").read_text()


def points(folder: Path) -> list[tuple[str, Path]]:
    return [(path.parent.name, path) for path in sorted(folder.glob("scaled/*/metrics.jsonl"))]


def lives(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return one.status() != psutil.STATUS_ZOMBIE
    return False
