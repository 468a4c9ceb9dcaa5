"""Every strategy keeps the contract of trainer/strategies/contract.py: one launch per strategy and size, many
questions."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.strategies.launching import SERVERS, VARIANTS, Case, launched, payload, selected
from tests.strategies.toy_server import ToyServer
from tests.strategies.truth import by_hand, replicas, start
from trainer.cli.compose import folder
from trainer.config.instantiate import locate
from trainer.strategies import builtin
from trainer.strategies.contract import Declaration

SHARED = ("data.global_batch_size=15", "data.train_samples=47", "sampler.drop_last=false", "data.work=static")
"""Nothing divides: workers get 7 and 8 of 15, and in the last update 1 and none of 2."""
UNEQUAL = ("sampler.pad=false", "sampler.drop_last=false")
SIZES = {
    "collective": [2, 4],
    "single": [1],
    "sharded": [2, 4],
    "sharded_optimizer": [2, 4],
    "local_sgd": [2, 4],
    "toy_server": [1, 2, 4],
    "pserver_sync": [1, 2, 4],
    "pserver_async": [1, 2],
    "pserver_ssp": [1, 2],
    "pserver_geo": [1, 2],
    "averaging": [2],
    "streams": [2],
    "hierarchical": [4],
}
SWEPT = [
    *(("toy_server", 1), ("toy_server", 4), ("local_sgd", 4), ("sharded", 4), ("sharded_optimizer", 4)),
    *(("collective", 4), ("pserver_sync", 1)),
]
"""Of ``make test-long``: other numbers of workers of strategies that are in ``make test`` with two, or with four."""
GROUPED = ("collective", "streams", "hierarchical", "sharded", "sharded_optimizer", "local_sgd", "averaging")
"""Those with a process group; the last one is the example of docs/adding.md."""
WEIGHTED = ("loss.weight=[3,0.5,0,1,2,0.1,1]",)
"""One class does not count, so that a batch, or a worker's whole update, may have no denominator."""
EXACT = {
    "plain": (),
    "clipped": ("strategy.clip_norm=2",),
    "merged": ("strategy.gradient_merge.k_steps=2",),
    "merged_sum": ("strategy.gradient_merge.k_steps=2", "strategy.gradient_merge.avg=false"),
    "padded": ("sampler.drop_last=false", "data.train_samples=37", "data.global_batch_size=null", "data.batch_size=4"),
    "shared": (*SHARED, "strategy.clip_norm=2"),
    "shared_merged": (*SHARED, "strategy.gradient_merge.k_steps=3"),
    "shared_merged_sum": (*SHARED, "strategy.gradient_merge.k_steps=3", "strategy.gradient_merge.avg=false"),
    "unequal": (*UNEQUAL, "data.train_samples=37", "strategy.clip_norm=2"),
    "nobody_left": (*UNEQUAL, "data.train_samples=33"),
    "unequal_merged": (*UNEQUAL, "data.train_samples=41", "strategy.gradient_merge.k_steps=2"),
    "unequal_merged_sum": (
        *UNEQUAL,
        "data.train_samples=41",
        "strategy.gradient_merge.k_steps=2",
        "strategy.gradient_merge.avg=false",
    ),
    "weighted": (*WEIGHTED, *UNEQUAL, "data.train_samples=41", "strategy.gradient_merge.k_steps=2"),
    "weighted_smoothed": (
        "loss.weight=[3,0.5,0.2,1,2,0.1,1]",
        "loss.label_smoothing=0.2",
        *SHARED,
        "strategy.gradient_merge.k_steps=3",
    ),
}
COVERING = (
    "plain",
    "plain_static",
    "merged",
    "padded",
    "unequal",
    "nobody_left",
    "shared_merged",
    "unequal_merged_sum",
    "sliced_clipped",
    "weighted",
)
"""Those of each strategy in ``make test``, and of four workers; ``WHOLE`` meet all there, and the others in ``make
test-long``."""
WHOLE = [("single", 1)]
LINEAR = {
    **{name: EXACT[name] for name in ("plain", "merged", "merged_sum", "padded")},
    "unequal": (*UNEQUAL, "data.train_samples=37", "optimizer.momentum=0"),
    "nobody_left": (*UNEQUAL, "data.train_samples=33", "optimizer.momentum=0"),
    "shared_merged": (*SHARED, "strategy.gradient_merge.k_steps=3", "optimizer.momentum=0"),
    "weighted": (*EXACT["weighted"], "optimizer.momentum=0"),
}
"""What local SGD with k_steps=1 does exactly: weighted averages go together with momentum where weights stay equal."""
LAYOUTS = {
    f"{precision}, {'channels_last' if last else 'contiguous'}": (
        "model=layered",
        "max_steps=6",
        f"precision={precision}",
        f"execution.channels_last={str(last).lower()}",
    )
    for precision in ("fp64", "fp32", "bf16")
    for last in (False, True)
}
"""Forced, so that they run on every CPU: in bf16 without instructions for it, torch computes by software."""
ROUNDING = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 0.02}
"""Greatest error of an element of a parameter, as a share of the way that the parameter's farthest element has come.

An element of a gradient is a sum of many terms that were rounded at 2**-53, 2**-24 or 2**-9 some ten times (layers
forward and backward), and roundings of either sign cancel in it: sqrt(10) * 2**-9 = 0.6% in bf16, and 6 updates with
momentum. Measured: 8e-15, 4e-6, 3e-3. Parameters of one worker alone, or in another order, are off by 0.3 and more.
"""
SHORT = ("limit_train_batches=3", "max_steps=100")
NORMS = ("model=norm_net",)


ALONE = {
    "pserver_async": ("strategy.independent_recv_thread=false", "strategy.send_queue_size=1"),
    "pserver_ssp": ("strategy.staleness=0",),
    "pserver_geo": ("strategy.k_steps=3",),
}
"""How the modes without lockstep are one process, with one worker."""
STATIC = ("data.work=static",)
SLICED = ("strategy.slice_above=100", "strategy.split_method=hash_name")


def exact_cases(strategy: str, workers: int) -> dict[str, tuple[str, ...]]:
    found = all_exact_cases(strategy, workers)
    return found if workers < 4 else {name: overrides for name, overrides in found.items() if name in COVERING}


def all_exact_cases(strategy: str, workers: int) -> dict[str, tuple[str, ...]]:
    if strategy in ALONE:
        leased = {name: (*ALONE[strategy], *overrides) for name, overrides in EXACT.items()}
        static = {f"{name}_static": (*overrides, *STATIC) for name, overrides in leased.items() if name == "plain"}
        return {**leased, **static} if workers == 1 else {}
    if strategy == "pserver_sync":
        return {**EXACT, "sliced": SLICED, "sliced_clipped": (*SLICED, "strategy.clip_norm=2")}
    if strategy != "local_sgd":
        return EXACT
    return {name: ("strategy.k_steps=1", *overrides) for name, overrides in LINEAR.items()}


def layouts(strategy: str, workers: int) -> dict[str, tuple[str, ...]]:
    """Runs in every precision and memory format, of one size of each strategy."""
    if workers > 2 or (workers == 1 and strategy not in ("single", *ALONE)):
        return {}
    own = ALONE[strategy] if strategy in ALONE and workers == 1 else ()
    own += ("strategy.k_steps=1",) if strategy == "local_sgd" else ()
    grid = {name: (*overrides, *own) for name, overrides in LAYOUTS.items() if name in layouts_among(strategy, workers)}
    if strategy == "pserver_sync":
        grid["bf16, channels_last, sliced"] = (*LAYOUTS["bf16, channels_last"], *SLICED)
    return grid


def layouts_among(strategy: str, workers: int) -> list[str]:
    """All; of workers out of step, whose parameters nobody can foretell, the two that differ most."""
    return ["fp64, contiguous", "bf16, channels_last"] if strategy in ALONE and workers > 1 else [*LAYOUTS]


def rest(strategy: str, workers: int) -> set[str]:
    """Cases of ``make test-long``: without them, each strategy meets two of the layouts, and each layout several."""
    if (strategy, workers) in WHOLE:
        return set()
    grid = [name for name in LAYOUTS if name in layouts(strategy, workers)]
    first = [*SIZES].index(strategy) % 3
    kept = {*COVERING, *grid[first::3], "bf16, channels_last, sliced"} if len(grid) > 2 else {*COVERING, *grid}
    return {*exact_cases(strategy, workers), *layouts(strategy, workers)} - kept


def cases(strategy: str, workers: int) -> dict[str, Case]:
    """Everything that is asked of a strategy in its launches."""
    group = strategy in GROUPED
    averages = group or strategy.startswith("pserver")
    average = ("strategy.buffers=average",) if averages else ()
    static = STATIC if strategy in ALONE else ()
    short = (*SHORT, *static)
    asked = {name: Case("trained", overrides) for name, overrides in exact_cases(strategy, workers).items()}
    asked |= {name: Case("trained", overrides) for name, overrides in layouts(strategy, workers).items()}
    asked |= {
        "summed": Case("summed"),
        "settled": Case("settled", (*NORMS, *short)),
        "settled_uneven": Case("settled", (*short, *UNEQUAL, "data.train_samples=33")),
        "started": Case("started", NORMS),
        "listening": Case("listening", short),
    }
    if averages:
        asked["averaged"] = Case("settled", (*NORMS, *short, *average))
    if group:
        asked["same_seed"] = Case("started", ("strategy.init=same_seed",))
        asked["overflowing"] = Case("overflowing", ("precision=fp16", "limit_train_batches=1", "max_steps=100"))
    if strategy == "local_sgd":
        asked["apart"] = Case(
            "step_by_step",
            (
                "limit_train_batches=1",
                "strategy.k_steps=4",
                "strategy.begin_step=2",
                "data.train_samples=16",
                "max_steps=10",
            ),
            {"epochs": 10},
        )
    if strategy == "pserver_geo":
        asked["each"] = Case(
            "settled_each",
            (
                "limit_train_batches=1",
                "strategy.k_steps=1",
                "strategy.overlap=false",
                "data.train_samples=16",
                "max_steps=10",
                "optimizer.momentum=0",
                *STATIC,
            ),
            {"epochs": 10},
        )
    return asked


DECLARED: dict[str, Any] = {
    "single": builtin.SingleDeclaration,
    "collective": builtin.CollectiveDeclaration,
    "sharded": builtin.ShardedDeclaration,
    "sharded_optimizer": partial(builtin.ShardedDeclaration, shard="optimizer"),
    "local_sgd": builtin.LocalSgdDeclaration,
    "toy_server": ToyServer,
    "pserver_sync": builtin.PserverSyncDeclaration,
    "pserver_async": builtin.PserverAsyncDeclaration,
    "pserver_ssp": builtin.PserverSspDeclaration,
    "pserver_geo": builtin.PserverGeoDeclaration,
    "averaging": locate("my_package.averaging.Averaging"),  # as launching.py has written it from the page
}
GROUPS = [(strategy, workers) for strategy, sizes in SIZES.items() for workers in sizes]
SEVERAL = [(strategy, workers) for strategy, workers in GROUPS if workers > 1]


def marked(cases: list[Any]) -> list[Any]:
    """Parameters that begin with a strategy and a number of workers; those that ``make test`` leaves out are marked."""
    return [
        pytest.param(*one, marks=[pytest.mark.long] * (one[:2] in SWEPT or one[-1] in rest(*one[:2]))) for one in cases
    ]


TWO_OR_FOUR = [2, pytest.param(4, marks=pytest.mark.long)]


WITH_GROUP = [(strategy, workers) for strategy, workers in GROUPS if strategy in GROUPED]


Evidence = Callable[[str, int], dict[str, Any]]
"""Asks for the answers of a strategy's launch."""


@pytest.fixture(scope="module")
def evidence(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """What the processes of a strategy answered, by case and then by rank; each group is launched once."""
    wanted = selected(request, "strategy", "workers", "case")

    @cache
    def gathered(strategy: str, workers: int) -> dict[str, Any] | Exception:
        many = {*exact_cases(strategy, workers), *layouts(strategy, workers)} - {"plain", "merged", "padded"}
        asked = {
            name: case
            for name, case in cases(strategy, workers).items()
            if name not in many or (strategy, workers, name) in wanted
        }
        logs = tmp_path_factory.mktemp(f"{strategy}{workers}")
        try:
            roles = launched(strategy, workers, asked, logs)
        except Exception as error:
            return error
        answers = {
            name: [roles["worker"][rank]["answers"][number] for rank in range(workers)]
            for number, name in enumerate(asked)
        }
        return {**answers, "pids": [p["pid"] for ranks in roles.values() for p in ranks.values()], "logs": logs}

    def gather(strategy: str, workers: int) -> dict[str, Any]:
        found = gathered(strategy, workers)
        if isinstance(found, Exception):
            raise found
        return found

    return gather


def servers(strategy: str, workers: int) -> int:
    return 1 if strategy == "toy_server" else SERVERS[workers] if strategy.startswith("pserver") else 0


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


def differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return any(not np.array_equal(one[name], other[name]) for name in one)


def test_every_registered_strategy_is_in_this_suite() -> None:
    known = {c for _, c in inspect.getmembers(builtin, inspect.isclass) if issubclass(c, Declaration)} - {Declaration}
    options = {path.stem for path in (folder("conf") / "strategy").glob("*.yaml")} - {"advise", "auto"}
    assert known - {
        builtin.PserverDeclaration,
        builtin.OutOfStepDeclaration,
        builtin.StaleDeclaration,
        builtin.EvaluatorsDeclaration,
    } <= set(DECLARED.values())
    assert options == SIZES.keys() - {"toy_server", "averaging", *VARIANTS}


@pytest.mark.all
@pytest.mark.parametrize(
    ("strategy", "workers", "case"), marked([(s, w, case) for s, w in GROUPS for case in exact_cases(s, w)])
)
def test_exact_strategy_equals_one_process_on_the_global_batch(
    evidence: Evidence, strategy: str, workers: int, case: str
) -> None:
    config = payload(strategy, workers, exact_cases(strategy, workers)[case])["config"]
    truth, validation, norms = by_hand(config, workers)
    assert len(norms) == 20
    if limit := config["strategy"]["clip_norm"]:
        assert min(norms) < limit < max(norms), "the test must see clipped and unclipped gradients"
    for rank, answer in enumerate(evidence(strategy, workers)[case]):
        assert answer["steps"] == 20
        assert_same(answer["parameters"], truth, 1e-10)
        assert answer["validation"] == pytest.approx(validation, abs=1e-10), f"rank {rank}"


@pytest.mark.parametrize(
    ("strategy", "workers", "case"), marked([(s, w, case) for s, w in GROUPS for case in layouts(s, w)])
)
def test_every_precision_and_memory_format_equals_one_process_in_float64(
    evidence: Evidence, strategy: str, workers: int, case: str
) -> None:
    overrides = layouts(strategy, workers)[case]
    config = payload(strategy, workers, overrides)["config"]
    truth, _, _ = by_hand(config, workers)
    begin = {name: p.detach().numpy() for name, p in start(config)[1].items()}
    answers = evidence(strategy, workers)[case]
    for answer in answers:
        assert_same(answer["parameters"], answers[0]["parameters"])
        strided = "channels_last" in case and strategy != "sharded"  # shards are of contiguous parameters
        assert answer["channels_last"] == ({"features.2.weight"} if strided else set())
    moved = {name: answers[0]["parameters"][name].astype(np.float64) - begin[name] for name in truth}
    way = {name: truth[name] - begin[name] for name in truth}
    if strategy in ALONE and workers > 1:  # nobody can say what they come to, but it is about the same way
        for name in truth:
            cosine = (moved[name] * way[name]).sum() / np.sqrt((moved[name] ** 2).sum() * (way[name] ** 2).sum())
            assert cosine > 0.3, name
        return
    for name in truth:
        np.testing.assert_allclose(
            moved[name], way[name], rtol=0, atol=ROUNDING[case[:4]] * np.abs(way[name]).max(), err_msg=name
        )


@pytest.mark.parametrize("strategy", DECLARED)
def test_exactness_is_declared_where_it_is_proved(strategy: str) -> None:
    config = {"k_steps": 1, "gradient_merge": {}, "clip_norm": None}
    assert DECLARED[strategy](**config).traits.exact == (strategy not in ALONE)
    assert not builtin.LocalSgdDeclaration(k_steps=4).traits.exact
    for lossy in (
        {"wire": "bf16"},
        {"wire": "int8"},
        {"evict_after": 9},
        {"entry": {"count": 2, "probability": 1.0}},
        {"entry": {"count": 1, "probability": 0.5}},
    ):
        assert not builtin.PserverSyncDeclaration(
            **{"wire": "full", "evict_after": None, "entry": {"count": 1, "probability": 1.0}} | lossy
        ).traits.exact


@pytest.mark.parametrize("workers", TWO_OR_FOUR)
def test_local_sgd_with_one_step_equals_collective(evidence: Evidence, workers: int) -> None:
    for case in ("plain", "merged", "padded"):
        [one, *_], [other, *_] = evidence("local_sgd", workers)[case], evidence("collective", workers)[case]
        assert_same(one["parameters"], other["parameters"], 1e-10)


@pytest.mark.parametrize("workers", TWO_OR_FOUR)
def test_local_sgd_workers_differ_between_averages_and_follow_the_replicas_by_hand(
    evidence: Evidence, workers: int
) -> None:
    overrides = cases("local_sgd", workers)["apart"].overrides
    truth = replicas(payload("local_sgd", workers, overrides)["config"], workers)
    answers = evidence("local_sgd", workers)["apart"]
    for rank, answer in enumerate(answers):
        for step, parameters in enumerate(answer["after"]):
            assert_same(parameters, truth[rank][step], 1e-10)
            averaged = step < 2 or step in (3, 7)
            assert differ(parameters, answers[0]["after"][step]) == (rank > 0 and not averaged), f"after update {step}"
        assert_same(answer["parameters"], answers[0]["parameters"])
    mean = {n: np.mean([t[-1][n] for t in truth], axis=0) for n in truth[0][-1]}
    assert_same(answers[0]["parameters"], mean, 1e-10)


@pytest.mark.all
@pytest.mark.parametrize("workers", [1, 2])
def test_geo_with_one_step_and_sgd_is_averaging(evidence: Evidence, workers: int) -> None:
    config = payload("pserver_geo", workers, cases("pserver_geo", workers)["each"].overrides)["config"]
    config["strategy"] |= {"begin_step": 0}
    truth = replicas(config, workers)
    for answer in evidence("pserver_geo", workers)["each"]:
        for step, parameters in enumerate(answer["after"]):
            assert_same(parameters, truth[0][step], 1e-10)


@pytest.mark.parametrize(("strategy", "workers"), marked(GROUPS))
def test_total_sums_over_workers(evidence: Evidence, strategy: str, workers: int) -> None:
    ranks = np.arange(workers)
    sums = [(ranks + 1.0).sum(), (10.0**ranks).sum(), 1e-12 * ranks.sum()]
    for answer in evidence(strategy, workers)["summed"]:
        np.testing.assert_allclose(answer["sums"], sums, rtol=1e-15)
        assert answer["dtype"] == "torch.float64"
        assert answer["untouched"], "all_reduce_sum() changed what it was given"


@pytest.mark.parametrize("case", ["settled", "settled_uneven"])
@pytest.mark.parametrize(("strategy", "workers"), marked(GROUPS))
def test_settled_workers_hold_identical_parameters_and_the_first_ones_buffers(
    evidence: Evidence, strategy: str, workers: int, case: str
) -> None:
    answers = evidence(strategy, workers)[case]
    for answer in answers:
        assert_same(answer["parameters"], answers[0]["parameters"])
        assert_same(answer["buffers"], answers[0]["before"])
        assert_same(answer["again"][0], answer["parameters"])
        assert_same(answer["again"][1], answer["buffers"])
    if case == "settled" and workers > 1:
        assert differ(answers[0]["before"], answers[1]["before"]), "the workers' own statistics must differ before"


@pytest.mark.parametrize(("strategy", "workers"), marked([(s, w) for s, w in SEVERAL if s not in ("toy_server",)]))
def test_settled_buffers_are_averaged_where_that_is_asked_for(evidence: Evidence, strategy: str, workers: int) -> None:
    answers = evidence(strategy, workers)["averaged"]
    mean = {name: np.mean([a["before"][name] for a in answers], axis=0) for name in answers[0]["before"]}
    for answer in answers:
        assert_same(answer["buffers"], mean, 1e-14)
        assert_same(answer["buffers"], answers[0]["buffers"])
        assert_same(answer["parameters"], answers[0]["parameters"])


@pytest.mark.parametrize(("strategy", "workers"), marked(SEVERAL))
def test_workers_start_equal_even_from_different_seeds(evidence: Evidence, strategy: str, workers: int) -> None:
    answers = evidence(strategy, workers)["started"]
    for answer in answers:
        assert_same(answer["parameters"], answers[0]["parameters"])
        assert_same(answer["buffers"], answers[0]["buffers"])


@pytest.mark.parametrize(("strategy", "workers"), marked(WITH_GROUP))
def test_same_seed_start_that_is_not_equal_is_refused(evidence: Evidence, strategy: str, workers: int) -> None:
    for answer in evidence(strategy, workers)["same_seed"]:
        assert answer["error"].startswith("strategy.init=same_seed: the workers drew different parameters")
        assert "strategy.init=broadcast" in answer["error"]


@pytest.mark.parametrize(("strategy", "workers"), marked(WITH_GROUP))
def test_overflow_in_fp16_is_skipped_by_all_in_exact_strategies_and_by_oneself_in_others(
    evidence: Evidence, strategy: str, workers: int
) -> None:
    answers = evidence(strategy, workers)["overflowing"]
    for rank, answer in enumerate(answers):
        skipped = strategy != "local_sgd" or rank == 1
        assert answer["changed"] == [not skipped, True]
        assert answer["scale"] == (2.0**15 if skipped else 2.0**16)
        assert all(np.isfinite(p).all() for p in answer["parameters"].values())
        if strategy == "collective":
            assert_same(answer["parameters"], answers[0]["parameters"])


@pytest.mark.parametrize(("strategy", "workers"), marked(GROUPS))
def test_leave_ends_every_process_and_frees_every_port(evidence: Evidence, strategy: str, workers: int) -> None:
    found = evidence(strategy, workers)
    gc.collect()
    assert len(found["pids"]) == workers + servers(strategy, workers)
    assert not [pid for pid in found["pids"] if psutil.pid_exists(pid)]
    addresses = [address for answer in found["listening"] for address in answer["addresses"]]
    if strategy in GROUPED:
        assert len(addresses) >= workers
    for answer in found["listening"]:
        assert answer["left"] == {"addresses": set(), "threads": []}, "of a worker that has left and still lives"
    held = {c.laddr: c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    for address in addresses:
        assert address[0] == "127.0.0.1"
        if address in held:  # the system may have given the port to a test beside this one since
            with suppress(psutil.NoSuchProcess):  # that test is over
                beside = psutil.Process(held[address]).environ().get("PYTEST_XDIST_WORKER")
                assert beside != os.environ.get("PYTEST_XDIST_WORKER")
    assert not [c for c in psutil.Process().net_connections() if c.status == "LISTEN"], "the launcher's own store"


@pytest.mark.parametrize(("strategy", "workers"), marked(SEVERAL))
def test_every_process_writes_its_own_log(evidence: Evidence, strategy: str, workers: int) -> None:
    logs: Path = evidence(strategy, workers)["logs"]
    expected = {f"workerlog.{rank}" for rank in range(workers)}
    assert {p.name for p in logs.glob("[!.]*")} == expected | {
        f"serverlog.{n}" for n in range(servers(strategy, workers))
    }
    for name in expected:
        assert "[Epoch 0, batch 0] loss: " in (logs / name).read_text()
