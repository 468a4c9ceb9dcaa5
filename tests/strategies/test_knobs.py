"""The knobs of async: each changes what its worker sends, as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.strategies.launching import Case, launched

STEPS = 24
PLAIN = (
    f"data.train_samples={16 * STEPS}",
    "data.work=static",
    "epochs=1",
    "max_steps=null",
    "scheduler.warmup_steps=0",
    "optimizer=sgd",
)
KNOBS = {
    "plain": (),
    "merged": ("max_merge_var_num=4", "send_wait_times=3"),
    "merged to the end": ("max_merge_var_num=100", "send_wait_times=99"),
    "seldom pulled": ("min_send_grad_num_before_recv=6",),
    "one under way": ("send_queue_size=1",),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one worker sent, by the name of its knobs."""
    cases = {name: Case("counted", (*PLAIN, *(f"strategy.{knob}" for knob in knobs))) for name, knobs in KNOBS.items()}
    answers = launched("pserver_async", 1, cases, Path(tmp_path_factory.mktemp("knobs")))["worker"][0]["answers"]
    return dict(zip(cases, answers, strict=True))


def test_every_update_is_a_push_and_a_pull_where_nothing_else_is_said(alone: dict[str, Any]) -> None:
    assert alone["plain"]["pushes"] == STEPS
    assert STEPS - 1 <= alone["plain"]["pulls"] <= STEPS + 1


def test_gradients_are_merged(alone: dict[str, Any]) -> None:
    assert alone["merged"]["pushes"] == STEPS // 4
    assert alone["merged"]["samples"] == [4 * 16] * (STEPS // 4)
    assert alone["merged to the end"]["samples"] == [STEPS * 16]


def test_parameters_are_pulled_less_often(alone: dict[str, Any]) -> None:
    assert alone["seldom pulled"]["pushes"] == STEPS
    assert STEPS // 6 - 1 <= alone["seldom pulled"]["pulls"] <= STEPS // 6 + 1


def test_no_more_pushes_are_under_way_than_the_queue_holds(alone: dict[str, Any]) -> None:
    assert alone["one under way"]["most_under_way"] == 1
    assert alone["plain"]["most_under_way"] <= 16
    assert sum(alone["one under way"]["samples"]) == sum(alone["plain"]["samples"]) == STEPS * 16


@pytest.mark.all
@pytest.mark.parametrize(
    "strategy", ["pserver_async", pytest.param("pserver_ssp", marks=pytest.mark.long), "pserver_geo"]
)
def test_workers_begin_together_where_that_is_asked_for(strategy: str, tmp_path: Path) -> None:
    cases = {
        name: Case("begun_late", (*PLAIN, f"strategy.launch_barrier={name}"), {"waits": name == "false"})
        for name in ("true", "false")
    }
    late = launched(strategy, 2, cases, tmp_path)["worker"][1]["answers"]
    assert late == [False, True], "whether the other worker had begun before"
