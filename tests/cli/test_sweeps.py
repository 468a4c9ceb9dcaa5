"""A sweep over options that take different keys: a point leaves out those that it has no use for, and says so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from trainer import __main__
from trainer.cli import compose, sweep_run
from trainer.job.ready import Ready
from trainer.job.result import Result
from trainer.wording import override

DIGITS = "+recipe=digits_lenet"
STRATEGIES = "strategy=single,local_sgd,pserver_async"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Ready]:
    """The jobs that would be run."""
    jobs: list[Ready] = []

    def execute(ready: Ready, *rest: Any) -> Result:
        jobs.append(ready)
        return Result("done", ready.plan.paths.run_dir)

    monkeypatch.setattr(sweep_run, "execute", execute)
    return jobs


def test_each_point_gets_the_keys_that_it_can_use(started: list[Ready], capsys: pytest.CaptureFixture[str]) -> None:
    keys = """
        launch.nproc=2 launch.servers=1 launch.workers=2 strategy.k_steps=3 strategy.gradient_merge.k_steps=2
    """.split()
    assert __main__.main(["-m", DIGITS, STRATEGIES, *keys, "tracking=none"]) == 0
    single, local_sgd, pserver = (ready.plan for ready in started)
    roles = [p.topology.roles for p in (single, local_sgd, pserver)]
    assert roles == [{"worker": 1}, {"worker": 2}, {"server": 1, "worker": 2}]
    assert [ready.checked.config.node("strategy").get("k_steps") for ready in started] == [None, 3, None]
    assert [p.batches.merge for p in (single, local_sgd, pserver)] == [2, 2, 2]
    assert [o.partition(":")[0] for o in local_sgd.remarks.left_out] == ["launch.servers=1"]
    assert [o.partition(":")[0] for o in pserver.remarks.left_out] == ["strategy.k_steps=3"]
    assert {o.partition(":")[0] for o in single.remarks.left_out} == {*keys[:-1]}
    assert "strategy.k_steps=3" not in capsys.readouterr().out.partition("strategy=single ")[2].partition("\n")[0]


def test_the_plan_of_each_point_says_what_is_left_out(run: Run, folder: Path) -> None:
    code, out, error = run("-m", DIGITS, STRATEGIES, "launch.nproc=2", "launch.servers=1", "plan=true")
    assert (code, error) == (0, "")
    single, local_sgd, pserver = (" ".join(plan.split()) for plan in out.split("Plan of digits_lenet")[1:])
    assert "left out launch.nproc=2: strategy=single is one process" in single
    assert "left out launch.servers=1: strategy=single has no servers" in single
    assert "left out launch.servers=1: strategy=local_sgd has no servers" in local_sgd
    assert "left out" not in pserver
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("engine", ["mpi", "ray", "kubernetes launch.image=i launch.volume=v"])
def test_an_engine_without_sweeps_refuses_one_before_anything_is_written(run: Run, folder: Path, engine: str) -> None:
    code, out, error = run("-m", DIGITS, "seed=1,2", *f"launch={engine}".split())
    assert (code, out) == (2, "") and error.startswith("error: --multirun: ")
    assert list(folder.iterdir()) == []


def test_a_swept_key_of_swept_options_is_left_out_where_it_has_no_use(started: list[Ready]) -> None:
    assert __main__.main(["-m", DIGITS, "optimizer=sgd,momentum", "optimizer.momentum=0.1,0.9", "tracking=none"]) == 0
    assert [ready.checked.config.optimizer.get("momentum") for ready in started] == [None, None, 0.1, 0.9]
    assert [len(ready.plan.remarks.left_out) for ready in started] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "name",
    ["it's", "a\\${b}'", "a\nb", *(pytest.param(n, marks=pytest.mark.all) for n in ("a b", "${HOME}", "-x", "ü"))],
)
def test_folders_of_any_name_are_found(
    name: str, started: list[Ready], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [override("hydra.sweep.dir", name), "hydra.sweep.subdir=s_${seed}_${now:%f}"]
    assert __main__.main(["-m", DIGITS, "seed=1,2", "tracking=none", "checkpoint=none", *typed]) == 0
    jobs = [Path(ready.plan.paths.run_dir) for ready in started]
    assert {job.parent for job in jobs} == {folder / name} and all((job / ".hydra").is_dir() for job in jobs)
    last = capsys.readouterr().out.splitlines()[-1]
    if "\n" not in name:
        assert all(shlex.quote(job.name) in last for job in jobs)
        assert shlex.split(last.partition("jobs are in ")[2])[0].rstrip(",").removeprefix("./").startswith(name)


@pytest.mark.parametrize(("mode", "ends"), [("train", ""), ("eval", "_eval"), ("predict", "_predict")])
def test_folder_tells_the_mode_of_its_run(mode: str, ends: str) -> None:
    with compose.hydra_app() as app:
        single = compose.compose(app, [DIGITS, f"mode={mode}"])
        assert re.fullmatch(rf"outputs/digits_lenet/[\d_-]+\d{ends}", single.hydra.run.dir)
        assert re.fullmatch(rf"multirun/digits_lenet/[\d_-]+\d{ends}", single.hydra.sweep.dir)
