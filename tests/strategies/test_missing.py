"""Meeting points cannot hang: each ends within its timeout, with an error that names who is missing and nobody else."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pace import patient
from tests.strategies.launching import Case, hand_over, selected, start
from trainer.config.schema.strategy import StreamingOptions
from trainer.errors import Died, RunFailed
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.started_process import Role
from trainer.strategies.local_sgd import Fragment, LocalSgd
from trainer.strategies.process_group import ProcessGroup, cause

STRATEGIES = [
    "collective",
    "sharded",
    "sharded_optimizer",
    "local_sgd",
    "toy_server",
    "pserver_sync",
    "pserver_async",
    "pserver_geo",
    "pserver_ssp",
]
NEVER_WAIT = ["pserver_async", "pserver_geo"]
"""Strategies whose workers do not meet in an update."""
SIDE_BY_SIDE = 4
"""Launches at a time of those that end by themselves: they wait for most of their time, and their starts take cores."""
MEETINGS = ("all_reduce_sum", "step", "synchronize")
MEET = [(s, m) for s in STRATEGIES for m in MEETINGS if m != "step" or s not in NEVER_WAIT]
QUICK = [
    ("collective", "all_reduce_sum"),
    ("collective", "step"),
    ("sharded", "step"),
    ("sharded_optimizer", "step"),
    ("local_sgd", "step"),
    ("local_sgd", "synchronize"),
    ("toy_server", "step"),
    ("pserver_sync", "step"),
    ("pserver_sync", "synchronize"),
    ("pserver_async", "all_reduce_sum"),
    ("pserver_geo", "synchronize"),
    ("pserver_ssp", "step"),
    ("pserver_ssp", "all_reduce_sum"),
]
"""Of ``make test``: each strategy, and each meeting in a process group and at servers; ``make test-long`` has all."""


@pytest.fixture(scope="module")
def timeout_s() -> float:
    """How long the workers wait for each other: longer where a step takes longer, because the machine has other
    work."""
    return min(30.0, max(3.0, patient(1.5)))


def overrides(timeout_s: float) -> tuple[str, ...]:
    return (
        f"strategy.timeout_s={timeout_s:g}",
        "max_steps=100",
        "data.global_batch_size=12",
        "model=norm_net",
        "data.work=static",
    )


@pytest.fixture(scope="module")
def waited(
    warm: None, timeout_s: float, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What each worker was told at each meeting of a strategy; the strategies wait side by side.

    Worker 1 never comes; worker 2 is late, and has not waited long when worker 0's patience ends.
    """
    arrivals = {0: 0.0, 2: timeout_s / 2}
    wanted = selected(request, "strategy", "meeting")
    meetings = {strategy: [m for s, m in wanted if s == strategy] for strategy, _ in wanted}

    def late(meeting: str) -> Case:
        return Case("late", overrides(timeout_s), {"meeting": meeting, "arrivals": arrivals})

    handed = {s: hand_over(s, 3, {m: late(m) for m in some}) for s, some in meetings.items()}
    with ThreadPoolExecutor() as pool:
        ended = {s: pool.submit(start, cases, tmp_path_factory.mktemp(s)) for s, cases in handed.items()}
    return {
        (s, m): [ended[s].result()["worker"][rank]["answers"][number] for rank in range(3)]
        for s, some in meetings.items()
        for number, m in enumerate(some)
    }


@pytest.mark.all
@pytest.mark.parametrize(
    ("strategy", "meeting"), [pytest.param(*one, marks=[pytest.mark.long] * (one not in QUICK)) for one in MEET]
)
def test_worker_that_never_arrives_is_named_within_the_timeout(
    waited: dict[tuple[str, str], list[dict[str, Any]]], timeout_s: float, strategy: str, meeting: str
) -> None:
    answers = waited[strategy, meeting]
    assert answers[2]["error"], "worker 2 was not told"
    if meeting != "synchronize":  # where the first worker only sends
        assert answers[0]["error"], "worker 0 was not told"
    for answer in (a for a in (answers[0], answers[2]) if a["error"]):
        assert answer["error"].startswith("worker 1 did not arrive at "), answer
        assert "worker 0" not in answer["error"] and "worker 2" not in answer["error"]
        assert f"within {timeout_s:g} s" in answer["error"]
        assert answer["since_start"] > timeout_s - 0.5, "nobody's patience had ended"
        assert answer["waited"] < timeout_s + patient(4)


LEASED = ["pserver_async", "pserver_ssp", "pserver_geo"]
"""Strategies that stand still in a leased block of work, too; of these the first one, for blocks are leased alike."""


@pytest.fixture(scope="module")
def stalled(
    warm: None, timeout_s: float, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[str, float]]:
    """How launches end of which worker 1 stands still: the error, and the seconds from the start. Some wait side by
    side."""

    def run(handed: list[dict[str, Any]], folder: Path) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(RunFailed) as caught:
            start(handed, folder)
        return str(caught.value), time.monotonic() - began

    options = {"stalled": overrides(timeout_s), "stalled_in_a_block": (*overrides(timeout_s)[:-1], "data.work=leased")}
    wanted = selected(request, "where", "strategy")
    handed = [hand_over(strategy, 2, {where: Case(where, options[where])}) for where, strategy in wanted]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        ended = list(pool.map(run, handed, [tmp_path_factory.mktemp("stalled") for _ in handed]))
    return dict(zip(wanted, ended, strict=True))


@pytest.mark.all
@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        ("stalled_in_a_block", LEASED[0]),
        *(("stalled", strategy) for strategy in STRATEGIES),
        *(pytest.param("stalled_in_a_block", strategy, marks=pytest.mark.long) for strategy in LEASED[1:]),
    ],
)
def test_stalled_worker_ends_the_run_with_its_name(
    stalled: dict[tuple[str, str], tuple[str, float]], timeout_s: float, where: str, strategy: str
) -> None:
    error, seconds = stalled[where, strategy]
    assert re.search(rf"worker 0: worker 1 did not arrive at .* within {timeout_s:g} s", error)
    assert where != "stalled" or seconds < timeout_s + patient(27)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711",
            "a connection was closed at its other end",
        ),
        (
            "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
            "Gloo connectFullMesh failed with no error",
        ),
        (
            "[../gloo/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
            "the time was over",
        ),
        ("[c10d] Connection reset by peer", "a connection was reset at its other end"),
    ],
)
def test_why_a_meeting_failed_is_said_without_a_librarys_own_places(said: str, why: str) -> None:
    assert cause(said) == why


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[pair.cc:5] Connection closed by peer [10.0.0.2]:1",
            (
                "worker 1 did not arrive at a sum: after 10 s a connection was closed at its other end "
                "(strategy.timeout_s=20)"
            ),
        ),
        ("[pair.cc:5] Timed out waiting 20000ms", "worker 1 did not arrive at a sum within 20 s (strategy.timeout_s)"),
    ],
)
def test_a_meeting_that_ended_before_its_time_tells_when_and_why(said: str, told: str) -> None:
    group = ProcessGroup.__new__(ProcessGroup)
    group.options = SimpleNamespace(timeout_s=20.0)  # type: ignore[assignment]
    group.roll_call = SimpleNamespace(missing=lambda number: [1])  # type: ignore[assignment]
    group.seat = SimpleNamespace(rank=0, names=lambda ranks: [f"worker {rank}" for rank in ranks])  # type: ignore[assignment]
    assert str(group._failed("a sum", RuntimeError(said), 10.2, 1)) == told


@pytest.mark.parametrize("samples", [0, 5])
def test_local_sgd_averages_before_a_validation_by_the_updates_that_all_workers_have_made(samples: int) -> None:
    """With ``sampler.pad=false`` a worker may have no sample since the last average, where another one has some."""
    made: Any = object.__new__(LocalSgd)
    made.options = SimpleNamespace(begin="parameters", begin_step=0, k_steps=2, streaming=StreamingOptions())
    made.updates, made.fragments, made.coming, made.adaptive, made.outer = 2, [Fragment(["weight"])], None, None, None
    made.updater = SimpleNamespace(step=lambda: None, state=dict)
    met: list[str] = []
    made._average, made.model = lambda fragments: met.append("average"), None
    made.group = SimpleNamespace(agree_on_buffers=lambda model: met.append("buffers"))
    made.synchronize()
    assert met == ["buffers"], "nobody has made an update since"
    made.step(samples)
    made.synchronize()
    assert met == ["buffers", "average", "buffers"]
    assert made.save(Path()).own == {"since": (3, 1, float(samples))}


@pytest.mark.all
@pytest.mark.parametrize(
    ("stopped", "polls"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.all)],
    ids=["hangs, and is missed where numbers are read", "is stopped, and is missed while the others are stuck in CUDA"],
)
def test_on_gpus_the_missing_worker_is_named_with_its_stack(
    warm: None, timeout_s: float, tmp_path: Path, stopped: bool, polls: bool
) -> None:
    case = Case("hangs_on_gpus", overrides(timeout_s), {"stopped": stopped, "polls": polls})
    roles = [Role("worker", 3, "tests.strategies.entries:each_case", ["cpu"] * 3)]
    began = time.monotonic()
    with pytest.raises(Died) as caught:
        handed = {"cases": hand_over("collective", 3, {"hang": case})}
        launch(roles, handed, tmp_path, Rendezvous(), hang_s=600.0, restarts=True)
    assert time.monotonic() - began < timeout_s + patient(27)
    first, *stack = str(caught.value).splitlines()
    how = "does not even answer: it is stopped" if stopped else "hangs"
    assert re.fullmatch(
        rf"worker 1 {how}, after 0 updates; worker [02]: worker 1 did not arrive at a sum over the workers "
        rf"within {timeout_s:g} s \(strategy.timeout_s\)",
        first,
    )
    assert caught.value.who == "worker 1"
    assert stopped or "in hangs_on_gpus" in stack[0]
