"""strategy=advise and a typed strategy=auto: the table, the choice, and what they refuse."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.strategies import CASES
from tests.cli.conftest import Run
from tests.host.pretended_driver import Asked, Card, Library, install, torch_shows
from tests.runs import trainer
from trainer.cli import advise
from trainer.config import schema
from trainer.errors import RunFailed
from trainer.host import hardware
from trainer.job.advice import CANDIDATES, NO_CANDIDATES, Row, best_of, concerns, ordered
from trainer.planning.cost import Cost

DIGITS = ("+recipe=digits_lenet", "execution.threads=1", "advise.updates=6")
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
REFUSED = {
    "strategy=advise launch.nproc=1": ("one worker has nobody to exchange with", "launch.nproc=2"),
    "strategy=advise mode=eval weights=a.pt": ("compares trainings", "mode=train"),
    "strategy=advise launch.nproc=2 launch.nnodes=2": ("the workers of one host", "advise.gbit=10"),
    "strategy=advise launch=slurm launch.nproc=2": ("the engine's job runs on others", "launch=local"),
    "strategy=advise launch.nproc=2 advise.workers=two": ("takes numbers of workers", "advise.workers=8,64,1024"),
    "strategy=advise launch.nproc=2 advise.workers=8,1": ("takes numbers of workers", "advise.workers=8,64,1024"),
    "strategy=advise launch.nproc=2 advise.worker=8": ("advise.worker", "advise.workers"),
    "strategy=advise launch.nproc=2 advise.gbit=1": ("all 2 workers are on one host", "advise.per_host=1"),
    "-m strategy=advise launch.nproc=2": ("no job of a sweep", "strategy=advise"),
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_compared_is_a_sentence_with_what_to_type(run: Run, folder: Path, typed: str) -> None:
    code, _, error = run("+recipe=digits_lenet", *typed.split())
    assert code == 2
    assert all(part in error for part in REFUSED[typed]), error
    assert not list(folder.iterdir())


def test_one_gpu_has_no_link_to_measure(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("NVIDIA H100 80GB HBM3", "GPU-11aa")
    install(monkeypatch, Library([card]))
    Asked(monkeypatch, torch_shows(card))
    code, _, error = run("+recipe=digits_lenet", "strategy=advise", "launch.nproc=2", "device=cuda")
    assert code == 2 and "the link is measured between two" in error, error


def words_of(options: type, key: str) -> list[str]:
    """The words that a strategy's key takes, as they are typed."""
    choices = next(field.metadata["choices"] for field in fields(options) if field.name == key)
    return [f"strategy.{key}={word}" for word in choices if word not in ("none", "full", "mean", "parameters")]


def test_every_strategy_is_compared_or_named_as_not_compared() -> None:
    compared = {word for candidate in CANDIDATES for word in candidate.words} | set(NO_CANDIDATES)
    names = {option.__name__.removesuffix("Strategy").lower() for option in schema.GROUPS["strategy"]}
    names -= {"group", "strategyconfig", "pserver", "free", "stale"}  # base classes
    typed = {word.partition("=")[2].replace("_", "") for word in compared if word.startswith("strategy=")}
    assert names <= typed
    wanted = words_of(schema.CollectiveStrategy, "comm_hook") + words_of(schema.CollectiveStrategy, "gradient_scale")
    for key in ("shard", "param_dtype", "reduce_dtype"):
        wanted += words_of(schema.ShardedStrategy, key)
    wanted += words_of(schema.LocalSgdStrategy, "exchange") + words_of(schema.LocalSgdStrategy, "begin")
    measured = [word for words in CASES.values() for word in words if word.startswith(("strategy=", "strategy.comm"))]
    assert {*wanted, *measured} <= compared
    assert not {word for candidate in CANDIDATES for word in candidate.words} & set(NO_CANDIDATES)


def row(name: str, step: float, exact: bool = True, fits: bool = True, exposed: float = 0.0) -> Row:
    options = schema.CollectiveStrategy()
    return Row(BY_NAME[name], options, Cost(step - exposed, exposed, 1e6), exact, memory=1e6, fits=fits)


def test_the_choice_is_equal_fits_and_is_faster_than_simpler_ones_by_more_than_a_prediction_can_err() -> None:
    slow, fast = row("collective", 1.0), row("sharded optimizer", 0.5)
    assert best_of([fast, slow]) is fast
    assert best_of([row("sharded optimizer", 0.97), slow]) is slow
    assert best_of([row("sharded optimizer", 0.5, fits=False), slow, row("bf16", 0.1, exact=False)]) is slow
    assert best_of([row("bf16", 0.1, exact=False)]) is None
    refused = Row(BY_NAME["dgc"], refused="x")
    listed = ordered([refused, row("bf16", 0.1, exact=False), row("sharded gradients", 0.1, fits=False), slow, fast])
    assert [one.candidate.name for one in listed] == [
        *("sharded optimizer", "collective", "sharded gradients", "bf16", "dgc")
    ]


def test_warnings_go_by_numbers() -> None:
    hidden = " ".join(concerns([row("collective", 1.0, exposed=0.04)], limit=1e9))
    assert "4.0% of an update" in hidden and "local_sgd" in hidden
    assert not list(concerns([row("collective", 1.0, exposed=0.06)], limit=1e9))
    shards = [row("collective", 1.0, exposed=0.06), row("sharded parameters", 1.3)]
    assert "takes 30% longer" in " ".join(concerns(shards, limit=1e9))
    assert not list(concerns(shards, limit=1.5e6)), "memory is short"
    assert not list(concerns(shards, limit=math.inf)), "memory is not known"


def table(screen: str) -> dict[str, list[str]]:
    """The rows of the table of strategies by candidate: numbers with their units."""
    names = sorted(BY_NAME, key=len, reverse=True)
    lines = screen.partition("Strategies for")[2].partition("measured here")[0].splitlines()
    found = [(next((name for name in names if line.strip().startswith(f"{name}  ")), ""), line) for line in lines]
    return {name: re.split(r" {2,}", line.strip())[1:] for name, line in found if name}


@pytest.mark.all
def test_advice_is_a_table_best_first_and_trains_nothing_in_the_end(tmp_path: Path) -> None:
    more = ("advise.workers=8,64", "advise.per_host=4", "advise.gbit=1", "launch.servers=1", "hydra.run.dir=advice")
    ended = trainer(*DIGITS, "strategy=advise", "launch.nproc=2", *more, cwd=tmp_path, pictures=True)
    assert ended.returncode == 0, ended.stderr
    shown, left = table(ended.stdout), json.loads((tmp_path / "advice" / "advise.json").read_text())
    assert list(shown) == [one["name"] for one in left["candidates"]] and set(shown) == set(BY_NAME)
    equal = [one for one in left["candidates"] if one["equal"]]
    assert {one["name"] for one in equal} == {
        *("collective", "comm_streams=4", "sharded optimizer", "sharded gradients", "sharded parameters"),
        "pserver_sync",
    }
    assert left["candidates"][: len(equal)] == equal and sorted(equal, key=lambda one: one["step"]) == equal
    assert left["samples_per_s"]["workers"] == [1, 2, 8, 64]
    assert (tmp_path / "advice" / "advise.png").stat().st_size > 10_000
    parts = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("advice/*/plan.json")}
    workers = {name: plan["topology"]["roles"]["worker"] for name, plan in parts.items()}
    two = ("no-exchange", "collective", "sharded-parameters", "bf16", "powersgd", "dgc")
    assert workers == {"one-worker": 1, **{f"two-workers-{name}": 2 for name in two}}
    assert "short training 7 of 7: two workers, dgc" in ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["advice"], "it tracks nothing"
    assert not (tmp_path / "advice" / "metrics.jsonl").exists()
    assert "predicted; measured: 1 and 2 workers" in ended.stdout
    link = left["measured"]["link"]
    assert 0 < link["alpha"] < 1 and 0 < link["beta"] < 1e-6


def test_the_table_follows_from_what_the_short_trainings_left(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers on two cores compute twice as long as two, and exchange a bucket of 45,400 bytes in Gloo's ring."""
    started: list[list[str]] = []

    def left(words: Sequence[str], place: Path, who: str) -> None:
        started.append([*words])
        if "strategy=sharded" in words:
            raise RunFailed(f"{who}: a training failed: some worker left out a parameter")
        parts = {"forward": 0.1, "backward": 0.15, "update": 0.05, "step": 0.3}
        alone = {name: value / 3 for name, value in parts.items()}
        link = [(size, 2e-3 + 1e-8 * size) for size in (1024, 65_536, 1 << 20)]
        place.mkdir(parents=True)
        found = alone if "launch.nproc=1" in words else {**parts, "link": link}
        if "strategy.comm_hook=powersgd" in words:
            found["step"] += 0.15
        (place / "probe.json").write_text(json.dumps(found))

    monkeypatch.setattr(advise, "start", left)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    four = ("launch.nproc=4", "plan=true", "strategy.bucket_cap_mb=2")
    code, out, error = run("+recipe=digits_lenet", "execution.threads=1", "strategy=advise", *four)
    assert code == 0, error
    piece = 45_400 / 8 * 1e-8 * 2  # s; the bytes are copied by half of the cores
    exposed = 2 * (1e-3 + 2 * piece + 2 * (1e-3 + piece))
    shown = table(out)
    assert shown["collective"][:3] == [f"{(0.6 + exposed) * 1e3:.1f} ms", "600.0 ms", f"{exposed * 1e3:.1f} ms"]
    assert shown["local_sgd k=4"][2] == f"{exposed / 4 * 1e3:.1f} ms"
    assert shown["sharded optimizer"][1] == "525.0 ms"  # a quarter of the update of 0.1 s
    assert shown["sharded parameters"] == ["refused: a training failed: some worker left out a parameter"]
    powersgd = [float(time.removesuffix(" ms")) for time in shown["powersgd"][:3]]
    # what it computed beside the exchange of two workers, 4 alpha less, takes twice as long on half of the cores
    assert powersgd[1] == 600.0 and abs(powersgd[2] - 2 * 150) < 8 and powersgd[0] > 890
    kept = [words.count("strategy.bucket_cap_mb=2") for words in started]
    assert kept == [0, 0, 1, 0, 1, 1, 1], "what a strategy has not is left out"
    assert ["strategy.powersgd.start_step=2" in words for words in started] == [False] * 5 + [True, False]
    assert "strategy.dgc.rampup_step=1" in started[-1], "compression begins at once"
    assert "measured here: an update of one worker 100.0 ms, of two that exchange nothing 300.0 ms" in out


def overrides(folder: Path) -> list[str]:
    found: Any = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    return [str(one) for one in found]


@pytest.mark.all
def test_auto_trains_with_what_it_chose_as_if_it_were_typed_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    command = (*DIGITS, "strategy=auto", "launch.nproc=2", "hydra.run.dir=run", "validation=false", "test=false")
    ended = trainer(*command, "max_steps=4", "checkpoint.every_steps=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = next(line for line in ended.stdout.splitlines() if line.startswith("chosen: ")).removeprefix("chosen: ")
    chosen = json.loads((tmp_path / "run" / "advise.json").read_text())["chosen"]
    assert chosen == said.split() and "strategy=auto" not in overrides(tmp_path / "run")
    assert set(chosen) <= set(overrides(tmp_path / "run"))
    name = json.loads((tmp_path / "run" / "plan.json").read_text())["strategy"]["name"]
    assert f"strategy={name}" == chosen[0]
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        tags = dict(store.execute("select key, value from tags"))
    assert "predicted" in tags["strategy.auto"] and said in tags["trainer.overrides"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mlflow.db", "mlruns", "run"], "the short trainings leave nothing"

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000004")  # as if it had been killed before
    again = trainer(*command, "max_steps=4", "checkpoint.every_steps=2", "resume=auto", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "short training" not in again.stdout and set(chosen) <= set(overrides(tmp_path / "run"))
    assert "resume" in again.stdout and "differences" not in again.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4


@pytest.mark.all
def test_auto_measures_nothing_for_one_worker_and_in_a_plan(tmp_path: Path) -> None:
    one = trainer(*DIGITS, "strategy=auto", "max_steps=2", "tracking=none", "hydra.run.dir=run", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert "short training" not in one.stdout and "strategy=single" in overrides(tmp_path / "run")
    plan = trainer(*DIGITS, "strategy=auto", "launch.nproc=2", "plan=true", cwd=tmp_path)
    assert plan.returncode == 0 and "collective" in plan.stdout and "short training" not in plan.stdout


@pytest.mark.all
def test_with_plan_advice_leaves_no_files(tmp_path: Path) -> None:
    ended = trainer(*DIGITS, "strategy=advise", "launch.nproc=2", "plan=true", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "to type: strategy=" in ended.stdout and "collective" in table(ended.stdout)
    assert not list(tmp_path.iterdir())
