"""A search with real trainings: a killed trial goes on, a seed decides all trials, the table marks the best ones."""

from __future__ import annotations

import csv
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import pace
from tests.runs import losses, points, start, trainer
from trainer.cli.sweep_search import FILE

optuna = pytest.importorskip("optuna")

SMALL = ("+recipe=digits_lenet", "execution.threads=1", "tracking=none")
SEARCH = ("-m", *SMALL, "sweep=optuna", "hydra.sweep.dir=sweep")


def trials(folder: Path) -> list[Any]:
    """The trials that Optuna itself reads from a sweep's file."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "sweep" / FILE))
    storage = optuna.storages.JournalStorage(backend)
    [name] = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


@pytest.mark.all
def test_a_trial_that_is_killed_is_tried_again_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    words = ("sweep.trials=2", "optimizer.lr=interval(0.01,0.1)", "epochs=15", "execution.log_every=20")
    search = start(*SEARCH, *words, cwd=tmp_path)
    log = tmp_path / "sweep" / "0" / "metrics.jsonl"
    try:
        pace.wait_for(lambda: log.exists() and '"val/' in log.read_text(), 120, "the first trial trains")
        [slot] = [
            one
            for one in psutil.Process(search.pid).children(recursive=True)
            if "trainer.cli.sweep_slot" in one.cmdline()
        ]
        os.kill(slot.pid, signal.SIGKILL)
        assert search.wait(120) == 0, (tmp_path / "screen.txt").read_text()
    finally:
        search.kill()
    said = (tmp_path / "screen.txt").read_text()
    assert "job 0 is started again: its process was killed by SIGKILL" in said and "job 0 of 2 goes on" in said
    found = trials(tmp_path)
    assert [one.state.name for one in found] == ["COMPLETE", "COMPLETE"]
    for one in found:
        assert one.value == max(points(tmp_path / "sweep" / str(one.number), "val/acc1"))
    whole = trainer(
        *SMALL, *words[2:], f"optimizer.lr={found[0].params['optimizer.lr']!r}", "hydra.run.dir=whole", cwd=tmp_path
    )
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "sweep" / "0") == losses(tmp_path / "whole") != []


@pytest.mark.all
def test_a_seed_decides_all_trials_and_their_results(tmp_path: Path) -> None:
    found = {}
    for name in ("one", "same"):
        (tmp_path / name).mkdir()
        space = ("optimizer.lr=tag(log,interval(0.001,1))", "data.batch_size=choice(64,128)")
        words = ("sweep.trials=3", "sweep.seed=5", "sweep.parallel=1", "epochs=1", *space)
        done = trainer(*SEARCH, *words, cwd=tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = [(one.number, one.params, one.value, one.state.name) for one in trials(tmp_path / name)]
    assert found["one"] == found["same"] and {state for *_, state in found["one"]} == {"COMPLETE"}
    assert len(found["one"]) == 3 and len({str(params) for _, params, *_ in found["one"]}) == 3


@pytest.mark.all
def test_of_two_objectives_the_table_marks_the_trials_that_none_beats_in_both(tmp_path: Path) -> None:
    space = ("sweep.sampler=grid", "data.batch_size=choice(8,512)", "optimizer.lr=choice(0.05,1e-9)")
    wanted = 'sweep.objective=[val/loss,"max perf/samples_per_s"]'
    done = trainer(*SEARCH, *space, wanted, "epochs=1", "execution.log_every=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    values = {}
    for number in range(4):
        run = tmp_path / "sweep" / str(number)
        values[number] = min(points(run, "val/loss")), max(points(run, "perf/samples_per_s"))
    beaten = {
        one
        for one, (loss, rate) in values.items()
        for other in values.values()
        if other != (loss, rate) and other[0] <= loss and other[1] >= rate
    }
    assert 0 < len(beaten) < 3, "small batches learn more in an epoch, large ones are faster"
    table = done.stdout.partition("Sweep\n")[2].splitlines()[1:5]
    assert {line.split()[0] for line in table} == {f"{'' if n in beaten else '*'}{n}" for n in range(4)}, done.stdout
    assert f"none is better in all of {4 - len(beaten)} jobs" in done.stdout
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        for row in csv.DictReader(file):
            loss, rate = values[int(row["job"])]
            assert math.isclose(float(row["best val/loss"]), loss, abs_tol=1e-4)
            assert math.isclose(float(row["best perf/samples_per_s"]), rate, abs_tol=1e-3)
