"""What servers saved starts a run that fits it, whose schedule goes on; one that does not fit is refused with a
sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import read
from tests.strategies.launching import Case, composed, hand_over, start
from trainer.errors import UserError

BASE = (
    "model=tabled",
    "data=clicks",
    "data.global_batch_size=24",
    "loss=binary_cross_entropy",
    "seed=3",
    "precision=fp64",
    "scheduler=cosine",
    "scheduler.warmup_steps=5",
    "scheduler.final=0.1",
    "tracking=none",
    "execution.val_every=0",
    "execution.threads=1",
    "device=cpu",
    "optimizer=momentum",
    "optimizer.lr=0.1",
    "optimizer.sparse=adagrad",
)
FIRST = 12
MERGED = ("strategy.max_merge_var_num=4", "strategy.send_wait_times=3")


def run(folder: Path, mode: str, workers: int, *overrides: str) -> list[list[float]]:
    """Each worker's rates; the run leaves ``persistables`` and what its servers did in the folder."""
    folder.mkdir()
    [handed] = hand_over(f"pserver_{mode}", workers, {"kept": Case("kept", overrides, base=BASE)})
    handed["payload"]["plan"]["paths"]["run_dir"] = str(folder)
    found = start([handed], folder)["worker"]
    return [found[rank]["answers"][0] for rank in range(workers)]


@pytest.fixture(scope="module")
def saved(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Async with merged gradients, and geo, both by two workers on two servers."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder / "async", "async", 2, f"max_steps={FIRST}", *MERGED)
    run(folder / "geo", "geo", 2, f"max_steps={FIRST}", "data.work=static", "strategy.k_steps=5")
    return folder


def test_the_mode_the_optimizer_the_precision_and_the_schedules_step_are_saved(saved: Path) -> None:
    told = read(saved / "async" / "persistables" / "index.json")["meta"]
    assert (told["mode"], told["optimizer"], told["dtype"]) == ("async", "SGD (momentum_buffer)", "float64")
    assert read(saved / "geo" / "persistables" / "index.json")["meta"]["step"] == FIRST


def test_merged_pushes_count_as_many_updates_of_the_schedule(saved: Path) -> None:
    for number in range(2):
        told = read(saved / "async" / f"server.{number}.json")
        assert told["pushes"] == told["version"] < 2 * FIRST / 2, "nothing was merged"
        assert told["step"] == FIRST


@pytest.mark.parametrize(("before", "mode", "workers"), [("async", "sync", 3), ("async", "ssp", 1), ("geo", "geo", 1)])
def test_schedule_goes_on_where_it_was_in_other_modes_and_with_other_numbers_of_workers(
    saved: Path, tmp_path: Path, before: str, mode: str, workers: int
) -> None:
    more = 8
    load = f"strategy.load_from={saved}/{before}/persistables"
    rates = run(tmp_path / "run", mode, workers, f"max_steps={more}", load, "scheduler.warmup_steps=15")
    first = [0.1 * (step + 1) / 15 for step in range(FIRST, 15)]
    for own in rates:
        assert own[:3] == pytest.approx(first, abs=1e-12)
    assert read(tmp_path / "run" / "server.0.json")["step"] == FIRST + more


@pytest.mark.parametrize(
    ("before", "mode", "change", "sentence"),
    [
        (
            "async",
            "sync",
            ("optimizer=adam",),
            r"SGD \(momentum_buffer\), and this run's optimizer is Adam \(exp_avg, exp_avg_sq, step\)",
        ),
        ("async", "async", ("optimizer=sgd",), r"SGD \(momentum_buffer\), and this run's optimizer is SGD \(nothing\)"),
        ("async", "sync", ("precision=fp32",), "its parameters are float64, and this run's are float32"),
        (
            "async",
            "sync",
            ("+model.hidden=6",),
            r"it holds 165 elements of hidden.weight, and this run's model has 198 elements of hidden.weight",
        ),
        ("async", "sync", ("+model.dim=4",), "it holds .* of"),
        (
            "async",
            "sync",
            ("optimizer.lr_factors={hidden: 0}",),
            "it holds 165 elements of hidden.weight, and this run's model has no hidden.weight",
        ),
        (
            "async",
            "sync",
            ("optimizer.sparse=sgd",),
            r"= \[50, 3, 'adagrad'\] of table .*, and this run's model has .* = \[50, 3, 'sgd'\]",
        ),
        ("async", "geo", (), "strategy=pserver_async saved it, and in pserver_geo optimizers are the workers'"),
        ("geo", "sync", (), "strategy=pserver_geo saved it, and in pserver_geo optimizers are the workers'"),
    ],
)
def test_another_mode_optimizer_precision_or_model_is_refused_before_anything_starts(
    saved: Path, before: str, mode: str, change: tuple[str, ...], sentence: str
) -> None:
    folder = saved / before / "persistables"
    load = f"strategy.load_from={folder}"
    typed = (*BASE, "max_steps=3", f"strategy=pserver_{mode}", "launch.nproc=1", load, *change)
    with pytest.raises(UserError, match=sentence) as refused:
        composed(*typed)
    assert refused.value.what == f"strategy.load_from={folder}" and refused.value.instead


def test_an_optimizer_of_the_same_kind_with_other_numbers_is_taken(saved: Path) -> None:
    folder = saved / "async" / "persistables"
    ready: Any = composed(
        *BASE,
        "max_steps=3",
        "strategy=pserver_ssp",
        "launch.nproc=1",
        "optimizer.momentum=0.5",
        f"strategy.load_from={folder}",
    )
    assert ready.checked.config.node("strategy")["load_from"] == str(folder)
