"""A search asks Optuna for each job, tells it the result, and goes on after a death as if there had been none."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.cli.conftest import Run
from tests.sweep.fake_jobs import LOSS, SPACE, run_all, search, write
from trainer.cli import sweep_search
from trainer.cli.sweep_objective import Objective
from trainer.cli.sweep_parallel import Parallel
from trainer.cli.sweep_space import Choice, Interval
from trainer.config.schema.run import SweepConfig
from trainer.errors import Interrupted, UserError
from trainer.job.result import Result

optuna = pytest.importorskip("optuna")


def bowl(words: dict[str, str]) -> float:
    """Least at a rate of 0.01, and with batches of 32."""
    return (math.log10(float(words["optimizer.lr"])) + 2) ** 2 + (words["data.batch_size"] == "16")


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_seed_decides_the_trials_also_of_a_search_that_goes_on(tmp_path: Path, sampler: str) -> None:
    names = ("one", "other", "seed", "cut")
    for name in names:
        (tmp_path / name).mkdir()
    keys = {"sampler": sampler, "trials": 14}
    one = run_all(search(tmp_path / "one", **keys), bowl)
    assert len(set(one)) == 14 and one == run_all(search(tmp_path / "other", **keys), bowl)
    assert one != run_all(search(tmp_path / "seed", seed=1, **keys), bowl)
    assert run_all(search(tmp_path / "cut", **keys), bowl, most=12) == one[:12]
    again = search(tmp_path / "cut", **keys)
    assert [job.shown for job, _ in again.before()] == one[:12] and run_all(again, bowl) == one[12:]


def test_tpe_finds_more_than_chance(tmp_path: Path) -> None:
    (tmp_path / "tpe").mkdir()
    last = run_all(search(tmp_path / "tpe", trials=30), bowl)[-10:]
    assert sum(bowl(dict(word.split("=") for word in job)) for job in last) / 10 < 0.8, "2.5 by chance"


def test_cmaes_and_grid(tmp_path: Path) -> None:
    pytest.importorskip("cmaes")
    for name in ("cma", "grid"):
        (tmp_path / name).mkdir()
    rates = [Interval("optimizer.lr", 1e-4, 1.0, log=True), Interval("optimizer.momentum", 0.0, 1.0)]
    found = run_all(search(tmp_path / "cma", space=rates, sampler="cmaes", trials=8), lambda words: 1.0)
    assert len(set(found)) == 8
    values = [Choice("a", ("x", "y")), Interval("b", 1, 3, whole=True)]
    ran = run_all(search(tmp_path / "grid", space=values, sampler="grid", trials=1), lambda words: 1.0)
    assert ran == [(f"a={a}", f"b={b}") for a in "xy" for b in (1, 2, 3)]


def test_a_job_whose_process_died_is_started_again_once(tmp_path: Path) -> None:
    found = search(tmp_path, trials=1)
    job = found.next()
    assert job is not None and found.next() is None
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").touch()
    dead = Result("failed", str(tmp_path / "0"), error="its process was killed by SIGKILL")
    assert not found.ended(0, dead, tmp_path / "0", died=True)
    again = found.next()
    assert again is not None and (again.number, again.shown) == (0, job.shown)
    assert again.words == (*job.words, "resume.path=auto")
    assert found.ended(0, dead, tmp_path / "0", died=True) and found.next() is None
    assert [one.state.name for one in found.study.trials] == ["FAIL"]


def test_an_interrupted_job_goes_on_with_the_next_command(tmp_path: Path) -> None:
    found = search(tmp_path, trials=2)
    job = found.next()
    assert job is not None and found.ended(0, Result("killed", ""), tmp_path / "0", died=False)
    again = search(tmp_path, trials=2)
    assert [(one.number, result) for one, result in again.before()] == [(0, None)]
    assert again.next() == job


def test_the_median_pruner_ends_a_job_that_is_worse_than_others_were(tmp_path: Path) -> None:
    found = search(tmp_path, pruner="median", trials=7)
    for number in range(6):
        job = found.next()
        assert job is not None
        write(tmp_path / job.subdir, {"val/loss": 0.5}, {"val/loss": 0.4})
        assert not found.is_enough(number, tmp_path / job.subdir)
        found.ended(number, Result("done", ""), tmp_path / job.subdir, died=False)
    assert found.next() is not None
    assert not found.is_enough(6, tmp_path / "6"), "nothing is validated yet"
    write(tmp_path / "6", {"val/loss": 0.9})
    assert found.is_enough(6, tmp_path / "6")
    assert found.ended(6, Result("pruned", ""), tmp_path / "6", died=False)
    assert found.study.trials[6].state.name == "PRUNED" and found.study.trials[6].intermediate_values == {1: 0.9}


def test_a_job_that_waits_at_its_rung_is_paused_when_the_search_is_left(tmp_path: Path) -> None:
    found = search(tmp_path, pruner="asha", rung=1, trials=3)
    for number, loss in enumerate([0.5, 0.9]):
        assert found.next() is not None
        write(tmp_path / str(number), {"val/loss": loss})
        found.is_enough(number, tmp_path / str(number))
    assert not found.ended(1, Result("pruned", ""), tmp_path / "1", died=False)
    ended: dict[int, Result] = {}
    sweep = SimpleNamespace(folder=tmp_path, flags=[], overrides=[], ended=ended, row=lambda shown, result: result)
    with pytest.raises(Interrupted):
        Parallel(cast(Any, sweep), found, [])._leave(cast(Any, SimpleNamespace(running={})), KeyboardInterrupt(), 1)
    assert {number: result.status for number, result in ended.items()} == {1: "paused"}


def test_several_objectives(tmp_path: Path) -> None:
    both = (*LOSS, Objective("perf/samples_per_s", is_less_better=False))
    found = search(tmp_path, objectives=both, trials=3)
    for number, (loss, speed) in enumerate([(0.5, 10.0), (0.4, 20.0), (0.3, 5.0)]):
        assert found.next() is not None
        write(tmp_path / str(number), {"val/loss": loss, "perf/samples_per_s": speed})
        found.ended(number, Result("done", ""), tmp_path / str(number), died=False)
    assert sorted(one.number for one in found.study.best_trials) == [1, 2]


def test_a_done_job_without_the_objective_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search(tmp_path, trials=1)
    assert found.next() is not None and found.ended(0, Result("done", ""), tmp_path / "0", died=False)
    assert "job 0 has not measured val/loss" in capsys.readouterr().out


def test_a_folder_of_another_space_is_refused(tmp_path: Path) -> None:
    search(tmp_path)
    with pytest.raises(UserError, match="holds a search of other space"):
        search(tmp_path, space=[*SPACE, Choice("epochs", ("1", "2"))])
    with pytest.raises(UserError, match=r"sweep.storage: cannot be used"):
        search(tmp_path, storage="nosuch://place")


@pytest.mark.parametrize(
    ("keys", "objectives", "why"),
    [
        ({"sampler": "cmaes"}, 1, "data.batch_size has a list of values"),
        ({"sampler": "grid"}, 1, "no end of values"),
        ({"pruner": "median"}, 2, "compares jobs by one metric, and sweep.objective has 2"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, str], objectives: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        sweep_search.check(SweepConfig(search="optuna", **keys), SPACE, objectives)  # type: ignore[arg-type]


def test_without_optuna_a_sentence_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'trainer\[search\]'") as raised:
        sweep_search.check(SweepConfig(search="optuna"), SPACE, 1)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["sweep=optuna"], "no key with several values"),
        (["sweep=optuna", "sweep.space={optimizer.lr: fast}"], "neither a list of values nor a range"),
        (["sweep=optuna", "sweep.space=fast"], "is no mapping"),
        (["sweep=optuna", "optimizer.lr=interval(0.1,1)", "launch=queue"], "sweep.parallel=auto"),
        (["sweep=optuna", "optimizer.lr=interval(-1,1)"], "optimizer.lr"),
        (["sweep=optuna", "optimizer.lr=0.1,1", "hydra.sweep.subdir=x"], "numbers as folders"),
        (["optimizer.lr=0.1,1", "sweep.parallel=0"], "sweep.parallel=0"),
        (["sweep=hyperopt", "optimizer.lr=0.1,1"], "optuna"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_anything_is_written(
    run: Run, folder: Path, typed: list[str], why: str
) -> None:
    code, out, error = run("-m", "+recipe=digits_lenet", "tracking=none", *typed)
    assert (code, out) == (2, "") and why in error, error
    assert list(folder.iterdir()) == []
