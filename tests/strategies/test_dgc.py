"""strategy.comm_hook=dgc against the paper's rule for workers one after the other, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.launching import Case, launched, payload, selected
from tests.strategies.tiny import images
from tests.strategies.truth import by_hand, descend, gradient, start, updates
from trainer.config.schema.strategy import DgcOptions
from trainer.optim.updater import Updater
from trainer.strategies.dgc import Dgc, sparsity_at

WORKERS, UPDATES, LEAST = 3, 20, 500
LARGE = ("features.0.weight", "features.3.weight", "classifier.weight")
"""Parameters of 500 numbers and more."""
RUN = (
    *("data.global_batch_size=12", f"max_steps={UPDATES}", "strategy.comm_hook=dgc", f"strategy.dgc.min_size={LEAST}"),
    *("data.train_samples=48", "limit_train_batches=1"),
)
ALL = ("strategy.dgc.sparsity=[0.0]",)
EQUAL = {
    "from the start": ALL,
    "from an update on": (*ALL, "strategy.dgc.rampup_begin_step=7"),
    "merged, several buckets": (
        *ALL,
        "strategy.gradient_merge.k_steps=2",
        "limit_train_batches=2",
        "strategy.bucket_cap_mb=0.01",
    ),
}
SPARSE = {
    "ramp": ("strategy.dgc.sparsity=[0.75,0.9,0.99]", "strategy.dgc.rampup_begin_step=4", "strategy.dgc.rampup_step=9"),
    "clipped": ("strategy.dgc.sparsity=[0.9]", "strategy.dgc.clip_norm=2"),
}
SUMMED = (
    "strategy.dgc.sparsity=[0.97]",
    "optimizer=sgd",
    "optimizer.weight_decay=0",
    "scheduler.final=1",
    "scheduler.warmup_steps=0",
)
NESTEROV = ("optimizer=nesterov", "optimizer.lr=0.05", "optimizer.weight_decay=0.01")
Answers = dict[str, list[dict[str, Any]]]


def replicas(config: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Parameters after each update: Lin et al., 2018, algorithms 1 and 4, with the decay in the gradient."""
    options, workers = config["strategy"]["dgc"], range(WORKERS)
    model, parameters = start(config)
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    u = [{} for _ in workers]
    v = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in workers]
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    seen, clipped = [], []
    for step, (batch,) in enumerate(updates(config, WORKERS)):
        own = [
            gradient(
                model,
                parameters,
                nn.functional.cross_entropy(model(inputs[batch[r::WORKERS]]), labels[batch[r::WORKERS]]),
            )
            for r in workers
        ]
        mean = {name: sum(g[name] for g in own) / WORKERS for name in parameters}
        since = step - options["rampup_begin_step"]
        if since >= 0:
            index = min(since * len(options["sparsity"]) // options["rampup_step"], len(options["sparsity"]) - 1)
            for name in LARGE:
                mean[name] = torch.zeros_like(mean[name])
                for r in workers:
                    g = own[r][name]
                    if options["clip_norm"]:
                        limit = options["clip_norm"] * WORKERS**-0.5
                        clipped.append(bool(g.norm() > limit))
                        g = g * min(1.0, limit / (g.norm() + 1e-6))
                    g = g + config["optimizer"]["weight_decay"] * parameters[name].detach()
                    u[r][name] = config["optimizer"]["momentum"] * u[r].get(name, momentum[name]) + g
                    v[r][name] = v[r][name] + u[r][name]
                    sent = int(g.numel() * (1 - options["sparsity"][index]))
                    threshold = v[r][name].abs().flatten().sort(descending=True).values[sent - 1]
                    mask = v[r][name].abs() >= threshold
                    assert mask.sum() == sent, "no two values are equal"
                    mean[name] += torch.where(mask, v[r][name], 0.0) / WORKERS
                    v[r][name], u[r][name] = v[r][name] * ~mask, u[r][name] * ~mask
        large = {n: p for n, p in parameters.items() if n in LARGE and since >= 0}
        descend(config, step, {n: p for n, p in parameters.items() if n not in large}, momentum, mean)
        plain = {**config, "optimizer": {**config["optimizer"], "momentum": 0.0, "weight_decay": 0.0}}
        descend(plain, step, large, {n: torch.zeros_like(p) for n, p in large.items()}, mean)
        seen.append({n: p.detach().numpy().copy() for n, p in parameters.items()})
    assert not options["clip_norm"] or {True, False} == {*clipped}
    return seen


@pytest.fixture(scope="module")
def answers(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    asked = {name for (name,) in selected(request, "case")}
    cases = {name: Case("trained", (*RUN, *overrides)) for name, overrides in EQUAL.items() if name in asked}
    cases |= {n: Case("gathered", (*RUN, *o), {"epochs": UPDATES}) for n, o in SPARSE.items() if n in asked}
    cases["summed"] = Case("gathered", (*RUN, *SUMMED), {"epochs": UPDATES})
    cases["nesterov"] = Case("trained", (*RUN, *ALL, *NESTEROV, "strategy.dgc.rampup_begin_step=3"))
    plain = (*(o for o in RUN if "comm_hook" not in o and "dgc" not in o), *NESTEROV)
    cases["nesterov, plain"] = Case("trained", plain)
    workers = launched("collective", WORKERS, cases, tmp_path_factory.mktemp("dgc"))["worker"]
    return {name: [workers[rank]["answers"][n] for rank in range(WORKERS)] for n, name in enumerate(cases)}


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.all
@pytest.mark.parametrize("case", EQUAL)
def test_sparsity_0_is_collective_with_momentum(answers: Answers, case: str) -> None:
    truth, validation, _ = by_hand(payload("collective", WORKERS, (*RUN, *EQUAL[case]))["config"], WORKERS)
    for answer in answers[case]:
        assert farthest(answer["parameters"], truth) < 1e-10
        assert answer["validation"] == pytest.approx(validation, abs=1e-10)


def test_sparsity_0_is_collective_with_nesterovs_momentum(answers: Answers) -> None:
    assert farthest(answers["nesterov"][0]["parameters"], answers["nesterov, plain"][0]["parameters"]) < 1e-10


@pytest.mark.parametrize("case", SPARSE)
def test_every_update_is_that_of_the_paper(answers: Answers, case: str) -> None:
    truth = replicas(payload("collective", WORKERS, (*RUN, *SPARSE[case]))["config"])
    for answer in answers[case]:
        for update, parameters in enumerate(answer["after"][1:]):
            assert farthest(parameters, truth[update]) < 1e-10, update + 1


def test_what_is_sent_and_what_is_kept_are_the_gradients(answers: Answers) -> None:
    """Without momentum: the steps' sum and the mean of what is kept are the sum of the true gradients."""
    config = payload("collective", WORKERS, (*RUN, *SUMMED))["config"]
    after = answers["summed"][0]["after"]
    model, parameters = start(config)
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    true = {name: np.zeros_like(p) for name, p in after[0].items()}
    for at, (batch,) in zip(after, updates(config, WORKERS), strict=False):
        model.load_state_dict({name: torch.from_numpy(p) for name, p in at.items()})
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        for name, found in gradient(model, parameters, loss).items():
            true[name] += found.numpy()
    for name in LARGE:
        kept = sum(answer["kept"][name] for answer in answers["summed"]) / WORKERS
        sent = (after[0][name] - after[-1][name]) / config["optimizer"]["lr"]
        np.testing.assert_allclose(sent.ravel() + kept, true[name].ravel(), rtol=0, atol=1e-10)
        assert np.abs(kept).max() > 0.01 * np.abs(true[name]).max(), "something was kept"


def test_bytes_are_counted(answers: Answers) -> None:
    """8 bytes of a value and 4 of its place, of 3% of 500, 10,000 and 560 numbers."""
    whole, sent = 8 * (500 + 10_000 + 560), 12 * (15 + 300 + 16)
    assert answers["summed"][0]["gauges"] == {"comm/compression": pytest.approx(whole / sent, rel=1e-15)}


def test_each_value_is_either_sent_or_kept_to_the_bit() -> None:
    torch.manual_seed(0)
    live = nn.Parameter(torch.randn(50, 40))
    updater = Updater(torch.optim.SGD([live], lr=0.1, momentum=0.9), lambda step: 1.0)
    memory = Dgc([("live", live)], DgcOptions(min_size=1), updater, 4)
    for _ in range(5):
        kept, momentum = (one.get("live", torch.zeros(2000)).clone() for one in (memory.kept, memory.momenta))
        g = torch.randn(2000)
        values, places = memory.chosen(live, g, 0.99)
        gathered = kept + (0.9 * momentum).add(g)
        assert len(values) == 20
        assert torch.equal(memory.kept["live"].index_add(0, places, values), gathered)
        assert not memory.kept["live"][places].any()
        assert not memory.momenta["live"][places].any(), "momentum factor masking"
        assert values.abs().min() >= memory.kept["live"].abs().max()


def test_shares_of_sparsity_come_in_turn() -> None:
    options = DgcOptions(sparsity=[0.75, 0.9, 0.999], rampup_step=10)
    assert [sparsity_at(options, step) for step in (0, 3, 4, 6, 7, 50)] == [0.75, 0.75, 0.9, 0.9, 0.999, 0.999]
