"""Options of local_sgd against replicas trained one after the other by hand, in float64: one launch, many runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.launching import Case, launched, payload, selected
from tests.strategies.tiny import images
from tests.strategies.truth import descend, gradient, start, updates
from trainer.strategies.adaptive_steps import steps
from trainer.strategies.local_sgd import divided
from trainer.strategies.outer_optimizer import LARGEST

WORKERS, UPDATES = 3, 14
RUN = (
    *("data.train_samples=48", "limit_train_batches=1", f"max_steps={UPDATES}", "data.global_batch_size=12"),
    *("strategy.k_steps=4", "scheduler.final=0.3"),
)
NESTEROV = ("strategy.outer.lr=0.7", "strategy.outer.momentum=0.9")
HALVES = ("strategy.streaming.fragments=2",)
OPTIONS = {
    "post-local": ("strategy.begin=gradients", "strategy.begin_step=5", "optimizer=adam", "optimizer.lr=0.01"),
    "adaptive": ("strategy.adaptive=true", "strategy.k_steps=2"),
    "adaptive from an update on": ("strategy.adaptive=true", "strategy.begin_step=3"),
    "outer": NESTEROV,
    "outer from an update on": (*NESTEROV, "strategy.begin_step=3"),
    "fragments": (*NESTEROV, *HALVES),
    "late": (*NESTEROV, *HALVES, "strategy.streaming.delay=2"),
    "late and kept": ("strategy.streaming.delay=1", "strategy.streaming.mix=0.25", "strategy.k_steps=3"),
    "int8": (*NESTEROV, "strategy.exchange=int8"),
}
ONE = ("strategy.k_steps=1", "optimizer=sgd", "optimizer.lr=0.05")
AS_COLLECTIVE = {
    "averages of parameters": ONE,
    "steps of 1 without momentum": (*ONE, "strategy.streaming.mix=0.1"),
    "bf16": (*ONE, "strategy.exchange=bf16"),
}
Parameters = dict[str, torch.Tensor]


def adam(config: dict[str, Any], step: int, parameters: Parameters, state: Parameters, gradients: Parameters) -> None:
    """Adam by its formulas, with the rates of :func:`tests.strategies.truth.descend`."""
    lr = rate(config, step)
    with torch.no_grad():
        for name, p in parameters.items():
            g = gradients[name] + (config["optimizer"]["weight_decay"] * p if p.dim() > 1 else 0)
            m = state[name] = 0.9 * state[name] + 0.1 * g
            v = state[f"{name} v"] = 0.999 * state.get(f"{name} v", torch.zeros_like(p)) + 0.001 * g * g
            p -= lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)


def rate(config: dict[str, Any], step: int) -> float:
    scheduler, total = config["scheduler"], config["max_steps"]
    warmup, final, lr = scheduler["warmup_steps"], scheduler["final"], config["optimizer"]["lr"]
    if step < warmup:
        return float(lr * (step + 1) / warmup)
    return float(lr * (final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup - 1))) / 2))


def rounded(differences: Parameters, how: str) -> Parameters:
    if how != "int8":
        return differences
    return {n: (d / (d.abs().max() / LARGEST)).round() * (d.abs().max() / LARGEST) for n, d in differences.items()}


def by_hand(config: dict[str, Any]) -> tuple[list[list[dict[str, np.ndarray]]], list[int]]:
    """For each worker its parameters after each update; the updates after which they averaged."""
    options = config["strategy"]
    outer, streaming = options["outer"], options["streaming"]
    crew = [start(config) for _ in range(WORKERS)]
    names = list(crew[0][1])
    parts = [names] if streaming["fragments"] == 1 else [names[:3], names[3:]]
    shared = {n: p.detach().clone() for n, p in crew[0][1].items()}
    buffers = {n: torch.zeros_like(p) for n, p in shared.items()}
    states = [{n: torch.zeros_like(p) for n, p in shared.items()} for _ in crew]
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    seen: list[list[dict[str, np.ndarray]]] = [[] for _ in crew]
    met, coming, following, first = [], {}, options["begin_step"] + options["k_steps"], None
    for step, (batch,) in enumerate(updates(config, WORKERS)):
        losses, gradients = [], []
        for rank, (model, parameters) in enumerate(crew):
            own = batch[rank::WORKERS]
            losses.append(nn.functional.cross_entropy(model(inputs[own]), labels[own]))
            gradients.append(gradient(model, parameters, losses[-1]))
        loss = float(sum(losses)) / WORKERS
        first = loss if first is None else first
        begins = step < options["begin_step"]
        if begins and options["begin"] == "gradients":
            mean = {n: sum(g[n] for g in gradients) / WORKERS for n in names}
            gradients = [mean] * WORKERS
        move = adam if config["optimizer"]["_target_"].endswith("Adam") else descend
        for (_, parameters), state, own in zip(crew, states, gradients, strict=True):
            move(config, step, parameters, state, own)
        for number, part in enumerate(parts):
            with torch.no_grad():
                if coming.get(number, (0,))[0] == step + 1:
                    arrive(crew, shared, buffers, coming.pop(number)[1], outer, streaming["mix"])
                due = (step + 1) % options["k_steps"] == (number * options["k_steps"] // len(parts))
                if options["adaptive"]:
                    due = step + 1 == following
                if begins and options["begin"] == "parameters":
                    for n in part:
                        shared[n] = sum(p[n] for _, p in crew).detach() / WORKERS
                        for _, parameters in crew:
                            parameters[n].copy_(shared[n])
                elif begins:
                    shared |= {n: crew[0][1][n].detach().clone() for n in part}
                elif due:
                    met.append(step + 1)
                    ways = [{n: shared[n] - p[n] for n in part} for _, p in crew]
                    if options["exchange"] == "int8":
                        ways = [rounded({n: w / WORKERS for n, w in way.items()}, "int8") for way in ways]
                        ways = [{n: w * WORKERS for n, w in way.items()} for way in ways]
                    mean = {n: sum(way[n] for way in ways) / WORKERS for n in part}
                    if streaming["delay"]:
                        coming[number] = step + 1 + streaming["delay"], mean
                    else:
                        arrive(crew, shared, buffers, mean, outer, 0.0)
                    k = math.sqrt(rate(config, 0) * loss / (rate(config, step + 1) * first) * options["k_steps"])
                    following = step + 1 + min(16, max(1, math.ceil(k)))
        for rank, (_, parameters) in enumerate(crew):
            seen[rank].append({n: p.detach().numpy().copy() for n, p in parameters.items()})
    return seen, met


def arrive(crew: Any, shared: Parameters, buffers: Parameters, mean: Parameters, outer: Any, mix: float) -> None:
    """Nesterov's momentum as Douillard et al. (2023) have it from PyTorch, on the mean way as a gradient."""
    for n, g in mean.items():
        buffers[n] = outer["momentum"] * buffers[n] + g
        shared[n] = shared[n] - outer["lr"] * (g + outer["momentum"] * buffers[n])
        for _, parameters in crew:
            parameters[n].copy_(mix * parameters[n] + (1 - mix) * shared[n])


Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    asked = {name for (name,) in selected(request, "case")}
    cases = {n: Case("step_by_step", (*RUN, *o), {"epochs": UPDATES}) for n, o in {**OPTIONS, **AS_COLLECTIVE}.items()}
    cases = {name: case for name, case in cases.items() if name in asked}
    workers = launched("local_sgd", WORKERS, cases, tmp_path_factory.mktemp("local_sgd"))["worker"]
    return {name: [workers[rank]["answers"][n] for rank in range(WORKERS)] for n, name in enumerate(cases)}


@pytest.fixture(scope="module")
def together(warm: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Parameters of collective with SGD after each update."""
    overrides = (*(one for one in RUN if "k_steps" not in one), *ONE[1:])
    case = {"": Case("step_by_step", overrides, {"epochs": UPDATES})}
    found = launched("collective", WORKERS, case, tmp_path_factory.mktemp("collective"))["worker"][0]["answers"][0]
    after: list[dict[str, np.ndarray]] = found["after"]
    return after


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.all
@pytest.mark.parametrize("case", OPTIONS)
def test_every_worker_follows_the_replicas_by_hand(answers: Answers, case: str) -> None:
    truth, met = by_hand(payload("local_sgd", WORKERS, (*RUN, *OPTIONS[case]))["config"])
    assert met, "workers averaged"
    for rank, answer in enumerate(answers[case]):
        for update, parameters in enumerate(answer["after"]):
            assert farthest(parameters, truth[rank][update]) < 1e-10, update + 1
        assert farthest(answer["parameters"], answers[case][0]["parameters"]) == 0.0, "settled"
    assert farthest(answers[case][0]["after"][-1], answers[case][1]["after"][-1]) > 0, "replicas differ"


@pytest.mark.parametrize("case", AS_COLLECTIVE)
def test_an_average_after_every_update_is_collective_with_sgd(
    answers: Answers, together: list[dict[str, np.ndarray]], case: str
) -> None:
    far = max(farthest(a, b) for a, b in zip(answers[case][0]["after"], together, strict=True))
    assert far < 1e-10 if case != "bf16" else 1e-6 < far < 2.0**-8 * 0.05 * UPDATES


def test_steps_grow_as_the_rate_falls_and_shrink_with_the_loss() -> None:
    """The reference's formula: clip(ceil(sqrt(lr_0 * loss / (lr * loss_0) * k)), 1, 16)."""
    assert [steps(0.1 * loss, lr * 2.0, 4) for loss, lr in ((2.0, 0.1), (0.5, 0.1), (2.0, 0.01), (0.0, 0.1))] == [
        2,
        1,
        7,
        1,
    ]
    assert steps(1.0, 1e-9, 4) == steps(1.0, 0.0, 4) == 16
    assert steps(math.nan, 1.0, 4) == 1


def test_fragments_are_neighbours_of_about_equal_size() -> None:
    sizes = {"a": 6, "b": 1, "c": 5, "d": 100}
    assert divided({name: torch.zeros(n) for name, n in sizes.items()}, 2) == [["a", "b", "c"], ["d"]]
    assert divided({name: torch.zeros(n) for name, n in sizes.items()}, 9) == [["a", "b", "c"], ["d"]]
