"""Sparse tables at servers are the tables of one process: every optimizer, any number of workers and servers, any
placement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies import launching
from tests.strategies.clicks import ROWS, Tabled, clicks
from tests.strategies.launching import Case, hand_over, selected, start
from trainer.models.embedding_tables import materialise
from trainer.optim.sparse import RowwiseAdagrad

STEPS = 25
BASE = (
    "model=tabled",
    "data=clicks",
    "data.global_batch_size=24",
    "loss=binary_cross_entropy",
    "seed=3",
    "precision=fp64",
    f"max_steps={STEPS}",
    "scheduler=cosine",
    "scheduler.warmup_steps=5",
    "scheduler.final=0.1",
    "tracking=none",
    "execution.val_every=0",
    "execution.threads=1",
    "device=cpu",
)
OPTIMIZERS: dict[str, tuple[tuple[str, ...], Any, Any]] = {
    "sgd": (
        ("optimizer=sgd", "optimizer.lr=0.3"),
        lambda p: torch.optim.SGD(p, lr=0.3),
        lambda p: torch.optim.SGD(p, lr=0.3),
    ),
    "momentum": (
        ("optimizer=momentum", "optimizer.lr=0.1", "optimizer.nesterov=true", "optimizer.sparse=adagrad"),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ),
    "adagrad": (
        (
            "optimizer=adagrad",
            "optimizer.lr=0.1",
            "optimizer.initial_accumulator_value=0.1",
            "+optimizer.lr_decay=0.05",
        ),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.05),
    ),
    "rowwise_adagrad": (
        ("optimizer=adagrad", "optimizer.lr=0.1", "optimizer.sparse=rowwise_adagrad"),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: RowwiseAdagrad(p, lr=0.1),
    ),
    "factors": (
        ("optimizer=adagrad", "optimizer.lr=0.1", "optimizer.lr_factors={rows: 0.5, plain: 0, bag.weight: 2}"),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adagrad([{"params": [t], "lr": lr} for t, lr in zip(p, (0.05, 0.0, 0.2), strict=True)]),
    ),
    "adam": (
        ("optimizer=adam", "optimizer.lr=0.03", "optimizer.betas=[0.8,0.9]"),
        lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.8, 0.9)),
        lambda p: torch.optim.SparseAdam(p, lr=0.03, betas=(0.8, 0.9)),
    ),
    "adamw": (
        ("optimizer=adamw", "optimizer.lr=0.03", "optimizer.weight_decay=0.1", "optimizer.decay_norms_and_biases=true"),
        lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
        lambda p: torch.optim.SparseAdam(p, lr=0.03),
    ),
}
PLACEMENTS = {
    "whole": ("strategy.slice_above=null",),
    "sliced": ("strategy.slice_above=4",),
    "hashed": ("strategy.slice_above=null", "strategy.split_method=hash_name"),
    "clipped": ("strategy.slice_above=20", "strategy.clip_norm=0.05"),
}
FULL = (3, 2)
"""Workers and servers with which every optimizer meets two placements; with other numbers, each meets one."""
SHORT = [FULL, (1, 1)]
"""Those of ``make test-all``; in ``make test-long`` they all meet every placement, and there are all other numbers."""
SIZES = [(workers, servers) for workers in range(1, 5) for servers in range(1, 4)]


def often(size: tuple[int, int], optimizer: int, placement: int) -> bool:
    """Whether optimizer and placement, by their numbers, meet at this size also outside of the long tests."""
    return (SIZES.index(size) + optimizer + placement) % (2 if size == FULL else len(PLACEMENTS)) == 0


CASES = [
    pytest.param(*size, optimizer, placement, marks=[pytest.mark.long] * (size not in SHORT or not often(size, n, m)))
    for size in [*SHORT, *(size for size in SIZES if size not in SHORT)]
    for n, optimizer in enumerate(OPTIMIZERS)
    for m, placement in enumerate(PLACEMENTS)
    if size in (*SHORT, (2, 1)) or often(size, n, m)
]


def case(optimizer: str, *more: str) -> Case:
    return Case("merged_tables", (*OPTIMIZERS[optimizer][0], *more), base=BASE)


@cache
def truth(optimizer: str, clip: float | None, seed: int, samples: int) -> dict[str, np.ndarray]:
    """One process, torch's own modules and optimizers, every parameter with its own kind of gradient."""
    torch.manual_seed(seed)
    model = Tabled().double()
    materialise(model, seed)
    tables = [model.rows.weight, model.plain.weight, model.bag.weight]
    dense = [p for p in model.parameters() if not any(p is t for t in tables)]
    _, make_dense, make_sparse = OPTIMIZERS[optimizer]
    optimizers = [make_dense(dense), make_sparse(tables)]
    rates = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    raw, labels = clicks(samples, 1)
    inputs = {k: torch.from_numpy(v) for k, v in raw.items()}
    step = epoch = 0
    while step < STEPS:
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        for first in range(0, len(order) // 24 * 24, 24):
            if step == STEPS:
                break
            chosen = order[first : first + 24]
            loss = nn.functional.binary_cross_entropy_with_logits(
                model({k: v[chosen] for k, v in inputs.items()}), torch.from_numpy(labels[chosen]).double()
            )
            loss.backward()
            if clip is not None:
                squares = [
                    (p.grad.coalesce().values() if p.grad.is_sparse else p.grad).square().sum()
                    for p in model.parameters()
                ]
                factor = min(1.0, clip / (sum(squares).sqrt().item() + 1e-6))
                for p in model.parameters():
                    p.grad = (p.grad.coalesce() if p.grad.is_sparse else p.grad) * factor
            for group, rate in rates:
                warm = (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 5) / (STEPS - 6))) / 2
                group["lr"] = rate * warm
            for o in optimizers:
                o.step()
                o.zero_grad()
            step += 1
        epoch += 1
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


Trained = Callable[[int, int], Any]


@pytest.fixture(scope="module")
def trained(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The configuration, and what each worker ended with, for all cases of so many workers and servers: one launch."""
    asked = selected(request, "workers", "servers", "optimizer", "placement")

    @cache
    def run(workers: int, servers: int) -> Any:
        wanted = [(optimizer, placement) for *size, optimizer, placement in asked if size == [workers, servers]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(launching.SERVERS, workers, servers)
            cases = {f"{o} {p}": case(o, *PLACEMENTS[p]) for o, p in wanted}
            handed = hand_over("pserver_sync", workers, cases)
        roles = start(copy.deepcopy(handed), tmp_path_factory.mktemp("tables"))
        answers = {key: [roles["worker"][r]["answers"][n] for r in range(workers)] for n, key in enumerate(wanted)}
        return handed[0]["payload"]["config"], answers

    return run


@pytest.mark.all
@pytest.mark.parametrize(("workers", "servers", "optimizer", "placement"), CASES)
def test_sync_servers_equal_one_process_with_torchs_own_tables(
    trained: Trained, workers: int, servers: int, optimizer: str, placement: str
) -> None:
    config, answers = trained(workers, servers)
    clip = 0.05 if placement == "clipped" else None
    expected = truth(optimizer, clip, config["seed"], config["data"]["train_samples"])
    first, *others = answers[optimizer, placement]
    assert len(others) == workers - 1
    assert first["parameters"].keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(first["parameters"][name], expected[name], rtol=0, atol=1e-10, err_msg=name)
    for other in others:
        for name in expected:
            np.testing.assert_array_equal(other["parameters"][name], first["parameters"][name])
    assert first["parameters"]["rows.weight"].shape == (ROWS, 3)


MODES = {
    "pserver_async": ("strategy.independent_recv_thread=false", "strategy.send_queue_size=1"),
    "pserver_ssp": ("strategy.staleness=0",),
    "pserver_geo": ("strategy.k_steps=3",),
}


ALONE = [
    pytest.param(mode, optimizer, marks=[pytest.mark.long] * (number % len(MODES) != first))
    for first, mode in enumerate(MODES)
    for number, optimizer in enumerate(OPTIMIZERS)
]
"""Outside of the long tests, each optimizer once."""


@pytest.fixture(scope="module")
def alone(
    warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """The configuration, and what one worker with two servers ended with, by optimizer: one launch of a mode."""
    asked = selected(request, "mode", "optimizer")

    @cache
    def run(mode: str) -> dict[str, Any]:
        wanted = {o: case(o, *MODES[mode]) for m, o in asked if m == mode}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(launching.SERVERS, 1, 2)
            handed = hand_over(mode, 1, wanted)
        roles = start(copy.deepcopy(handed), tmp_path_factory.mktemp(mode))
        answers = roles["worker"][0]["answers"]
        return {o: (handed[n]["payload"]["config"], answers[n]["parameters"]) for n, o in enumerate(wanted)}

    return run


@pytest.mark.all
@pytest.mark.parametrize(("mode", "optimizer"), ALONE)
def test_one_worker_without_a_queue_equals_local_training(
    alone: Callable[[str], dict[str, Any]], mode: str, optimizer: str
) -> None:
    config, parameters = alone(mode)[optimizer]
    for name, expected in truth(optimizer, None, config["seed"], config["data"]["train_samples"]).items():
        np.testing.assert_allclose(parameters[name], expected, rtol=0, atol=1e-10, err_msg=name)
