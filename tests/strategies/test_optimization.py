"""Groups, schedules, clipping by value, scaled rates and averaged weights: several processes equal torch's own classes
in one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from tests.strategies import launching
from tests.strategies.launching import Case, hand_over, selected
from tests.strategies.launching import start as start_processes
from tests.strategies.tiny import images
from tests.strategies.truth import start, updates, validation

STEPS = 20
BASE = (
    "model=lenet",
    "model.image_size=8",
    "data=tiny",
    "data.global_batch_size=16",
    "seed=3",
    "precision=fp64",
    f"max_steps={STEPS}",
    "tracking=none",
    "execution.val_every=0",
    "execution.threads=1",
    "device=cpu",
)
COSINE = ("scheduler=cosine", "scheduler.warmup_steps=3", "scheduler.final=0.1")
UNEQUAL = ("sampler.pad=false", "sampler.drop_last=false", "data.train_samples=37")
Groups = list[dict[str, Any]]


def lenet(model: nn.Module, *rates: tuple[float, float]) -> Groups:
    """Weight and bias of each of the three layers with (learning rate, decay), in that order."""
    parameters = list(model.parameters())
    return [{"params": [p], "lr": lr, "weight_decay": wd} for p, (lr, wd) in zip(parameters, rates, strict=True)]


@dataclass(frozen=True)
class Wanted:
    """A run: what is typed, torch's optimizer for the model written by hand, and what else the truth has to do."""

    typed: tuple[str, ...]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    lr: float
    clip_value: float | None = None
    decay: Callable[[int], float] | None = None
    plateau: bool = False
    every: int = 0
    stops: int = STEPS


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """lr 0.004, doubled for a batch of 16 where 8 was meant; 0.8 for each layer; the first at a quarter; biases
    double."""
    lr, wd = 0.008, 0.05
    return torch.optim.AdamW(
        lenet(
            model,
            (lr * 0.25 * 0.64, wd),
            (lr * 2 * 0.64, 0.0),
            (lr * 0.8, wd),
            (lr * 2 * 0.8, 0.0),
            (lr, wd),
            (lr * 2, 0.0),
        ),
        lr=lr,
    )


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    """The first layer frozen, all that is left decays; sqrt(16 / 64) of lr 0.1."""
    return torch.optim.SGD(lenet(model, (0.0, 0.0), (0.0, 0.0), *[(0.05, 0.01)] * 4), lr=0.05, momentum=0.9)


RUNS = {
    "rates": Wanted(
        (
            "optimizer=adamw",
            "optimizer.lr=0.004",
            "optimizer.weight_decay=0.05",
            "optimizer.layer_decay=0.8",
            "optimizer.lr_factors={features.0: 0.25, *.bias: 2}",
            "optimizer.lr_scaling=linear",
            "optimizer.lr_base_batch=8",
            "strategy.clip_value=0.003",
            *COSINE,
        ),
        adamw,
        0.008,
        clip_value=0.003,
        decay=lambda n: min(0.9, 1 - (1 + n / 2) ** -0.75),
    ),
    "frozen": Wanted(
        (
            "optimizer=momentum",
            "optimizer.lr=0.1",
            "optimizer.weight_decay=0.01",
            "optimizer.lr_factors={features.0: 0}",
            "optimizer.decay_norms_and_biases=true",
            "optimizer.lr_scaling=sqrt",
            "optimizer.lr_base_batch=64",
            *COSINE,
        ),
        frozen,
        0.05,
        decay=lambda n: 0.9,
    ),
    "unequal": Wanted(
        (
            "optimizer=rmsprop",
            "optimizer.lr=0.002",
            "optimizer.alpha=0.9",
            "strategy.clip_value=0.003",
            *COSINE,
            *UNEQUAL,
        ),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.002, alpha=0.9),
        0.002,
        clip_value=0.003,
        decay=lambda n: 0.8,
    ),
    "plateau": Wanted(
        (
            "optimizer=nesterov",
            "optimizer.lr=0.05",
            "optimizer.weight_decay=0.01",
            "scheduler=plateau",
            "scheduler.patience=0",
            "scheduler.min_delta=0.2",
            "scheduler.gamma=0.5",
            "execution.val_every_steps=2",
        ),
        lambda m: torch.optim.SGD(lenet(m, *[(0.05, 0.01), (0.05, 0.0)] * 3), lr=0.05, momentum=0.9, nesterov=True),
        0.05,
        decay=lambda n: 0.8,
        plateau=True,
        every=2,
    ),
    "stopped": Wanted(
        (
            "optimizer=adagrad",
            "optimizer.lr=0.01",
            "scheduler=one_cycle",
            "execution.val_every_steps=3",
            "early_stop.metric=val/loss",
            "early_stop.patience=2",
            "early_stop.min_delta=100",
        ),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
        0.01,
        every=3,
        stops=9,
    ),
}
AVERAGED = {
    "rates": ("ema.decay=0.9", "ema.warmup=true", "ema.gamma=2", "ema.power=0.75"),
    "frozen": ("ema.decay=0.9",),
    "unequal": ("ema.decay=0.8",),
    "plateau": ("ema.decay=0.8",),
    "stopped": (),
}
STATIC = ("data.work=static",)
SLICED = ("strategy.slice_above=100", "strategy.split_method=hash_name")
STRATEGIES: dict[tuple[str, int, int], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("collective", 2, 0): (tuple(RUNS), ()),
    ("single", 1, 0): (tuple(RUNS), ()),
    ("local_sgd", 2, 0): (("frozen", "plateau"), ("strategy.k_steps=1",)),
    ("pserver_sync", 2, 2): (tuple(RUNS), SLICED),
    ("pserver_async", 1, 2): (
        tuple(RUNS),
        (*SLICED, *STATIC, "strategy.independent_recv_thread=false", "strategy.send_queue_size=1"),
    ),
    ("pserver_geo", 1, 2): (tuple(RUNS), (*STATIC, "strategy.k_steps=3")),
}
"""Who does exactly what one process does: strategy, workers, servers: the runs, and the options that make them
exact."""
FOLLOWED = ("single", "collective", "local_sgd", "pserver_sync")
"""Strategies that keep an average of the weights."""


def case(strategy: str, run: str, more: tuple[str, ...]) -> Case:
    averaged = AVERAGED[run] if strategy in FOLLOWED else ()
    return Case("optimized", (*RUNS[run].typed, *averaged, *more), base=BASE)


@dataclass
class Truth:
    """What one process comes to with torch's own classes."""

    parameters: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]
    rates: list[float]
    metrics: dict[str, float]
    clipped: list[bool]


def truth(run: str, config: dict[str, Any]) -> Truth:
    """By hand: one process on the global batches."""
    wanted = RUNS[run]
    model, _ = start(config)
    optimizer = wanted.optimizer(model)
    rates = [g["lr"] for g in optimizer.param_groups]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2, threshold_mode="abs")
    one_cycle = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cycle = lr_scheduler.OneCycleLR(one_cycle, 1.0, STEPS, cycle_momentum=False)
    average = AveragedModel(model, avg_fn=lambda old, new, n: old * (d := wanted.decay(int(n) - 1)) + new * (1 - d))
    average.update_parameters(model)  # its first call copies
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    told, clipped = [], []
    for step, batches in enumerate(updates(config, 1)):
        if step == wanted.stops:
            break
        chosen = np.concatenate(batches)
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        if wanted.clip_value is not None:
            clipped.append(any((p.grad.abs() > wanted.clip_value).any() for p in model.parameters()))
            nn.utils.clip_grad_value_(model.parameters(), wanted.clip_value)
        if not wanted.plateau:
            cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 4))) / 2
            factor = (step + 1) / 3 if step < 3 else cosine
            factor = one_cycle.param_groups[0]["lr"] if run == "stopped" else factor
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            told.append(wanted.lr * factor)
        else:
            told.append(max(g["lr"] for g in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad()
        one_cycle.step(), cycle.step()
        if wanted.decay is not None:
            average.update_parameters(model)
        if wanted.plateau and (step + 1) % wanted.every == 0:
            plateau.step(validation(config, model)["loss"])
    averaged = average.module
    metrics = {f"val/{k}": v for k, v in validation(config, model).items()}
    metrics |= {f"val_ema/{k}": v for k, v in validation(config, averaged).items()}
    arrays = [{n: p.detach().numpy() for n, p in m.named_parameters()} for m in (model, averaged)]
    return Truth(*arrays, told, metrics, clipped)


Answers = Callable[[tuple[str, int, int]], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the workers of a strategy answered, by run; one launch for each strategy."""
    wanted = selected(request, "size", "run")

    @cache
    def gather(size: tuple[str, int, int]) -> dict[str, Any]:
        strategy, workers, servers = size
        more, runs = STRATEGIES[size][1], [run for one, run in wanted if one == size]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(launching.SERVERS, workers, servers)
            handed = hand_over(strategy, workers, {run: case(strategy, run, more) for run in runs})
        folder: Path = tmp_path_factory.mktemp(strategy)
        roles = start_processes(copy.deepcopy(handed), folder)
        found = {run: [roles["worker"][r]["answers"][n] for r in range(workers)] for n, run in enumerate(runs)}
        return {**found, "configs": {run: handed[n]["payload"]["config"] for n, run in enumerate(runs)}}

    return gather


@pytest.mark.parametrize(("size", "run"), [(s, run) for s, (runs, _) in STRATEGIES.items() for run in runs], ids=str)
def test_any_number_of_processes_equals_torchs_own_classes_in_one(
    answers: Answers, size: tuple[str, int, int], run: str
) -> None:
    config = copy.deepcopy(answers(size)["configs"][run])
    config["data"]["batch_size"] *= size[1]
    expected, wanted = truth(run, config), RUNS[run]
    if wanted.clip_value is not None:
        assert all(expected.clipped), "the test must see gradients that are clipped"
    if wanted.plateau:
        assert len(set(expected.rates)) > 2, "the test must see rates that fall"
    for answer in answers(size)[run]:
        assert answer["steps"] == wanted.stops
        assert bool(answer["ended"]) == (wanted.stops < STEPS)
        assert answer["rates"] == pytest.approx(expected.rates, abs=1e-12)
        close(answer["parameters"], expected.parameters)
        averages = bool(AVERAGED[run]) and size[0] in FOLLOWED
        if averages:
            close(answer["averaged"], expected.averaged)
        validated = {k: v for k, v in answer["metrics"].items() if k.startswith("val")}
        prefixes = ("val/", "val_ema/") if averages else ("val/",)
        assert validated == pytest.approx(
            {k: v for k, v in expected.metrics.items() if k.startswith(prefixes)}, abs=1e-10
        )


def close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10, err_msg=name)
