"""DDP's own knobs, each with the equality or closeness that it promises: one launch of three workers, many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer
from tests.runs import points
from tests.strategies.launching import Case, launched, payload, selected
from tests.strategies.tiny import Flat, images
from tests.strategies.truth import by_hand, gradient, start, updates
from trainer.strategies.comm_hooks import PowerSgd

WORKERS = 3
SIZE = ("data.global_batch_size=12",)
MERGED = ("strategy.gradient_merge.k_steps=2",)
UNEVEN = ("sampler.pad=false", "sampler.drop_last=false")
PLAIN = ("optimizer=sgd", "optimizer.weight_decay=0", "scheduler.final=1", "scheduler.warmup_steps=0")
ONE_STEP = ("limit_train_batches=1", "max_steps=100")
GATED = ("model=gated", "data.train_samples=60")
UNUSED = ("strategy.find_unused_parameters=true",)
COPIES = ("strategy.gradient_as_bucket_view=false",)
SMALL = ("strategy.bucket_cap_mb=0.001",)
POWERSGD = ("strategy.comm_hook=powersgd", "strategy.powersgd.start_step=2")
LOW_RANK = ("model=flat", "data.global_batch_size=3", *PLAIN, "max_steps=8")
"""Of so few updates: error feedback makes five times as much of a rounding error in each."""

BY_HAND = {
    "static graph": (*SIZE, "strategy.static_graph=true"),
    "static graph, small buckets": (*SIZE, *SMALL, *COPIES, "strategy.static_graph=true"),
    "copies": (*SIZE, *COPIES),
    "copies, merged": (*SIZE, *COPIES, *MERGED),
    "unused looked for and merged": (*SIZE, *UNUSED, *MERGED),
}
"""LeNet against training written out by hand."""
MORE_SAMPLES = ("data.train_samples=49", *UNEVEN)
AS_SINGLE = {
    "gated": (*SIZE, *GATED),
    "gated, copies": (*SIZE, *GATED),
    "gated, small buckets, merged": (*SIZE, *GATED, *MERGED),
    "gated, uneven": (*SIZE, "model=gated", *MORE_SAMPLES),
    "never used, static": (*SIZE, *GATED, "model.gated=false"),
    "norms": (*SIZE, "model=norm_net", *MORE_SAMPLES),
    "norms, merged": (*SIZE, "model=norm_net", "data.train_samples=61", *UNEVEN, *MERGED),
}
"""Models of their own against strategy=single; after 48 or 60 samples, 12 a batch, one is left for worker 0 alone."""
KNOBS = {
    "gated": UNUSED,
    "gated, copies": (*UNUSED, *COPIES),
    "gated, small buckets, merged": (*UNUSED, *SMALL),
    "gated, uneven": UNUSED,
    "never used, static": ("strategy.static_graph=true",),
    "norms": ("strategy.sync_batch_norm=true",),
    "norms, merged": ("strategy.sync_batch_norm=true",),
}
ROUNDING = {"fp16": (2.0**-11, 2.0**-24), "bf16": (2.0**-8, 0.0)}
"""Unit roundoff, and half the distance of the smallest numbers."""
HALVED = {hook: (*SIZE, *PLAIN, *ONE_STEP, f"strategy.comm_hook={hook}") for hook in ROUNDING}
OTHERS = {
    **{hook: Case("step_by_step", overrides, {"epochs": 3}) for hook, overrides in HALVED.items()},
    "low rank": Case("trained", (*LOW_RANK, *POWERSGD, "strategy.powersgd.rank=3")),
    "errors": Case("compressed", (*SIZE, "model=flat", *PLAIN, *ONE_STEP, *POWERSGD), {"epochs": 12}),
    "gated, compressed": Case("trained", (*SIZE, *GATED, *UNUSED, *POWERSGD)),
    "many buckets, compressed": Case("trained", (*LOW_RANK, *POWERSGD, *SMALL, "model=lenet")),
    "added": Case(
        "trained",
        (
            *SIZE,
            "strategy.gradient_scale=sum",
            f"optimizer.lr={0.05 / WORKERS}",
            f"optimizer.weight_decay={0.01 * WORKERS}",
        ),
    ),
    "own norms": Case("settled", (*SIZE, "model=norm_net", "data.train_samples=25", *UNEVEN)),
    "unused": Case("failing", (*SIZE, *GATED, "model.gated=false")),
    "changing": Case("failing", (*SIZE, *GATED, "strategy.static_graph=true", "strategy.timeout_s=5")),
}


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> set[str]:
    """Cases that are asked for: those of the parametrized tests that are to run, and of all others."""
    asked = {name for parameter in ("case", "hook") for (name,) in selected(request, parameter)}
    return asked | {"low rank", "errors", "added", "own norms", "unused", "changing"}


@pytest.fixture(scope="module")
def together(warm: None, wanted: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the three workers answered, by case and rank."""
    cases = {name: Case("trained", overrides) for name, overrides in BY_HAND.items()}
    cases |= {name: Case("trained", (*overrides, *KNOBS[name])) for name, overrides in AS_SINGLE.items()}
    cases = {name: case for name, case in {**cases, **OTHERS}.items() if name in wanted}
    workers = launched("collective", WORKERS, cases, tmp_path_factory.mktemp("ddp"))["worker"]
    return {name: [workers[rank]["answers"][n] for rank in range(WORKERS)] for n, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone(warm: None, wanted: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same of one process without any knob."""
    asked = {name: overrides for name, overrides in {**AS_SINGLE, "low rank": LOW_RANK}.items() if name in wanted}
    cases = {name: Case("trained", overrides) for name, overrides in asked.items()}
    answers = launched("single", 1, cases, tmp_path_factory.mktemp("single"))["worker"][0]["answers"]
    return dict(zip(cases, answers, strict=True))


def greatest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("case", BY_HAND)
def test_knobs_that_change_no_number_equal_one_process(together: dict[str, Any], case: str) -> None:
    truth, validation, _ = by_hand(payload("collective", WORKERS, BY_HAND[case])["config"], WORKERS)
    for answer in together[case]:
        assert greatest_difference(answer["parameters"], truth) < 1e-10
        assert answer["validation"] == pytest.approx(validation, abs=1e-10)


def test_added_gradients_are_as_many_means_as_there_are_workers(together: dict[str, Any]) -> None:
    """With a rate for each worker, and the decay of all in the gradient, an update is that of the mean."""
    truth, *_ = by_hand(payload("collective", WORKERS, SIZE)["config"], WORKERS)
    for answer in together["added"]:
        assert greatest_difference(answer["parameters"], truth) < 1e-10


@pytest.mark.parametrize("case", AS_SINGLE)
def test_unused_parameters_and_fewer_batches_equal_one_process(
    together: dict[str, Any], alone: dict[str, Any], case: str
) -> None:
    for answer in together[case]:
        assert answer["steps"] == alone[case]["steps"] == 20
        assert greatest_difference(answer["parameters"], alone[case]["parameters"]) < 1e-10
        assert answer["validation"] == pytest.approx(alone[case]["validation"], abs=1e-10)


@pytest.mark.parametrize("case", ["gated", "never used, static"])
def test_unused_parameters_stay_as_they_are_where_the_optimizer_is_shared_out(
    alone: dict[str, Any], case: str, tmp_path: Path
) -> None:
    cases = {case: Case("trained", (*AS_SINGLE[case], *UNUSED))}
    for one in launched("sharded_optimizer", WORKERS, cases, tmp_path)["worker"].values():
        [answer] = one["answers"]
        assert greatest_difference(answer["parameters"], alone[case]["parameters"]) < 1e-10


def test_unused_parameters_that_nobody_looks_for_end_with_the_key(together: dict[str, Any]) -> None:
    for answer in together["unused"]:
        assert answer["error"].endswith(
            "left parameters of the model without a gradient. Use strategy.find_unused_parameters=true."
        )
    said = " ".join(answer["error"] for answer in together["changing"])
    assert "uses other parameters than its first (strategy.static_graph=true)" in said


def test_worker_without_a_batch_keeps_its_own_statistics(together: dict[str, Any]) -> None:
    counted = [int(answer["before"]["features.1.num_batches_tracked"]) for answer in together["own norms"]]
    assert counted == [3, 2, 2]  # 12, 12 and 1 of 25 samples


def gradients_of_workers(config: dict[str, Any], batch: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Each worker's mean gradient of its part of the run's first batch, in float64."""
    model, parameters = start(config)
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    parts = [batch[rank::WORKERS] for rank in range(WORKERS)]
    losses = [nn.functional.cross_entropy(model(inputs[part]), labels[part]) for part in parts]
    return [{n: g.numpy() for n, g in gradient(model, parameters, loss).items()} for loss in losses]


@pytest.mark.parametrize("hook", HALVED)
def test_halved_gradients_are_as_close_as_rounding_allows_and_equal_on_all_workers(
    together: dict[str, Any], hook: str
) -> None:
    config = payload("collective", WORKERS, HALVED[hook])["config"]
    (batch,) = next(updates(config, WORKERS))
    apart = gradients_of_workers(config, batch)
    first = {n: p.detach().numpy() for n, p in start(config)[1].items()}
    unit, smallest = ROUNDING[hook]
    lost = 0.0
    for name in first:
        mean = sum(g[name] for g in apart) / WORKERS
        # each gradient is rounded, divided (and rounded), and added to the others' sum (and rounded)
        bound = sum(np.abs(g[name]) for g in apart) / WORKERS * ((1 + unit) ** (WORKERS + 2) - 1)
        got = (first[name] - together[hook][0]["after"][0][name]) / config["optimizer"]["lr"]
        assert (np.abs(got - mean) <= bound + (WORKERS + 2) * smallest + 1e-12).all(), name
        lost = max(lost, float(np.abs(got - mean).max()))
    assert lost > 1e-6, "nothing was halved"
    for answer in together[hook]:
        for step in range(3):
            assert greatest_difference(answer["after"][step], together[hook][0]["after"][step]) == 0.0


def test_powersgd_is_exact_where_gradients_have_no_more_than_its_rank(
    together: dict[str, Any], alone: dict[str, Any]
) -> None:
    for answer in together["low rank"]:
        assert greatest_difference(answer["parameters"], alone["low rank"]["parameters"]) < 1e-9


def test_powersgd_adds_later_what_it_leaves_out(together: dict[str, Any]) -> None:
    """The steps' sum and the mean of what is still left out are the sum of the true gradients: error feedback."""
    config = payload("collective", WORKERS, OTHERS["errors"].overrides)["config"]
    model = Flat(config["data"]["num_classes"], 8).double()
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    answers = together["errors"]
    after, epochs = answers[0]["after"], len(answers[0]["after"]) - 1
    for answer in answers:
        assert all(greatest_difference(a, b) == 0.0 for a, b in zip(answer["after"], after, strict=True))
    assert answers[0]["gauges"]["comm/compression"] > 2
    true = {name: np.zeros_like(p) for name, p in after[0].items()}
    for epoch in range(epochs):
        batch = np.random.default_rng((config["seed"], epoch)).permutation(config["data"]["train_samples"])[:12]
        model.load_state_dict({name: torch.from_numpy(p) for name, p in after[epoch].items()})
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        for name, found in gradient(model, dict(model.named_parameters()), loss).items():
            true[name] += found.numpy()
    for name in true:
        left_out = sum(answer["errors"][name] for answer in answers) / WORKERS
        stepped = (after[0][name] - after[-1][name]) / config["optimizer"]["lr"]
        np.testing.assert_allclose(stepped.ravel() + left_out, true[name].ravel(), rtol=0, atol=1e-10)
        if name.endswith("weight"):
            assert np.abs(left_out).max() > 0.01 * np.abs(true[name]).max(), "nothing was left out"


@pytest.mark.parametrize("case", ["gated, compressed", "many buckets, compressed"])
def test_powersgd_of_several_buckets_stays_equal_on_all_workers(together: dict[str, Any], case: str) -> None:
    answers = together[case]
    for answer in answers:
        assert greatest_difference(answer["parameters"], answers[0]["parameters"]) == 0.0
        assert all(np.isfinite(p).all() for p in answer["parameters"].values())


def test_what_powersgd_left_out_follows_its_parameters_into_other_buckets() -> None:
    sizes = [2, 3, 4]
    memory = PowerSgd([nn.Parameter(torch.zeros(n)) for n in sizes], 1, 2)
    before = {0: [(2, 4)], 1: [(1, 3), (0, 2)]}
    for bucket, layout in before.items():
        memory.lay_out(bucket, layout)
    memory.torch.error_dict = {0: torch.full((4,), 2.0), 1: torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])}
    memory.lay_out(0, [(1, 3), (2, 4)])
    memory.lay_out(1, [(0, 2)])
    assert memory.torch.error_dict[0].tolist() == [1.0] * 3 + [2.0] * 4
    assert memory.torch.error_dict[1].tolist() == [0.0] * 2
    memory.lay_out(0, [(1, 3), (2, 4)])
    assert memory.torch.error_dict[0].tolist() == [1.0] * 3 + [2.0] * 4


@pytest.mark.all
def test_digits_are_learnt_from_compressed_gradients(warm: None, tmp_path: Path) -> None:
    hook = ("strategy.comm_hook=powersgd", "strategy.powersgd.rank=2", "strategy.powersgd.start_step=20")
    result = trainer.run(
        [
            "+recipe=digits_lenet",
            "strategy=collective",
            "launch.nproc=2",
            *hook,
            "tracking=none",
            "execution.threads=1",
            f"hydra.run.dir={tmp_path}",
        ]
    )
    assert result.metrics["val/acc1"] > 0.97
    assert points(tmp_path, "comm/compression")[-1] > 1.5
