"""Fused optimizers train like unfused ones: after skipped updates, with late parameters, from any checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.composed import ready
from trainer.errors import UserError
from trainer.optim.fused import is_dense, why_not, why_not_by_auto
from trainer.optim.groups import Rate, optimizer_of
from trainer.optim.states import is_fused
from trainer.optim.updater import Updater
from trainer.worker.model import Updaters, build_model

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "momentum": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "momentum of 0.5": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.5, "maximize": True},
    "adam": {"_target_": "torch.optim.Adam", "lr": 0.01},
    "amsgrad": {"_target_": "torch.optim.Adam", "lr": 0.01, "amsgrad": True},
    "adamw": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
    "adagrad": {"_target_": "torch.optim.Adagrad", "lr": 0.05, "initial_accumulator_value": 0.1},
}
LATE = "2.bias"
"""A parameter that has no gradient in the first updates."""


@pytest.fixture(autouse=True)
def memory_is_never_zero_by_chance() -> Iterator[None]:
    """torch.empty gives NaN, so that what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def model(last: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 5))
    return net.to(memory_format=torch.channels_last) if last else net


def updater(net: nn.Module, node: dict[str, Any], fused: bool, scales: bool = True, **more: Any) -> Updater:
    node = {**node, "fused": fused}
    named = dict(net.named_parameters())
    return Updater(
        optimizer_of(node, [(Rate(), list(named.values()))]),
        lambda step: 1.0 / (1 + step),
        loss_scaling=scales,
        names=list(named),
        **more,
    )


def train(net: nn.Module, own: Updater, first: int, last: int, bad: tuple[int, ...] = (), late: int = 0) -> None:
    """Make the updates ``first`` to ``last - 1``; the gradients of those in ``bad`` are infinite."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 3, 4, 4, generator=generator)
        factor = math.inf if step in bad else 1.0
        net.get_parameter(LATE).requires_grad_(step >= late)
        own.backward(net(inputs).square().mean() * factor)
        own.step()


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in net.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("bad", [(0,), (0, 1, 4), (2,)])
@pytest.mark.parametrize("case", CASES)
def test_skipped_updates_leave_no_trace(case: str, bad: tuple[int, ...], clip_norm: float | None) -> None:
    ends = []
    for fused in (False, True):
        net = model()
        own = updater(net, CASES[case], fused, clip_norm=clip_norm)
        train(net, own, 0, 8, bad)
        assert own.scaler is not None and own.scaler.get_scale() == 2.0 ** (16 - len(bad))
        ends.append(weights(net))
    assert same(*ends) and not same(ends[0], weights(model()))


@pytest.mark.parametrize("case", ["momentum", "nesterov", "momentum of 0.5"])
def test_buffers_of_zero_give_torchs_own_first_update_to_the_bit(case: str) -> None:
    node = {k: v for k, v in CASES[case].items() if k != "_target_"}
    ours, theirs = model(), model()
    train(ours, updater(ours, CASES[case], True, scales=False), 0, 6)
    train(theirs, Updater(torch.optim.SGD(theirs.parameters(), fused=True, **node), lambda s: 1.0 / (1 + s)), 0, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_may_get_its_first_gradient_later(case: str) -> None:
    ends = []
    for fused in (False, True):
        net = model()
        train(net, updater(net, CASES[case], fused), 0, 8, bad=(0, 3), late=3)
        ends.append(weights(net))
    assert same(*ends)


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_fused_or_not(case: str, before: bool, after: bool, cut: int) -> None:
    """Cut after the first update, which is skipped; before and after a late parameter has its first gradient. The
    memory format changes as well."""
    bad, late = (0, 3), 3
    whole = model()
    train(whole, updater(whole, CASES[case], False), 0, 8, bad, late)
    begun = model(last=True)
    first = updater(begun, CASES[case], before)
    train(begun, first, 0, cut, bad, late)
    resumed = model()
    resumed.load_state_dict(begun.state_dict())
    second = updater(resumed, CASES[case], after)
    second.load(**copy.deepcopy(first.state()))
    assert is_fused(second.optimizer) == after
    train(resumed, second, cut, 8, bad, late)
    assert same(weights(resumed), weights(whole))


def test_a_parameter_that_was_frozen_before_begins_with_an_empty_buffer() -> None:
    node, frozen, begun = CASES["momentum"], model(), model()
    some = {name: p for name, p in begun.named_parameters() if name != LATE}
    first = Updater(
        optimizer_of({**node, "fused": True}, [(Rate(), list(some.values()))]), lambda s: 1.0, names=[*some]
    )
    train(begun, first, 0, 2, late=9)
    frozen.load_state_dict(begun.state_dict())
    second = updater(frozen, node, True)
    second.load(**copy.deepcopy(first.state()))
    buffers = {name: second.optimizer.state[p]["momentum_buffer"] for name, p in frozen.named_parameters()}
    assert not buffers.pop(LATE).any() and all(buffer.any() for buffer in buffers.values())
    train(frozen, second, 2, 5, bad=(2,))
    assert all(w.isfinite().all() for w in weights(frozen))


def test_a_dampening_is_refused() -> None:
    node = {**CASES["momentum"], "dampening": 0.1}
    updater(model(), node, fused=False)
    with pytest.raises(UserError, match=r"optimizer.fused=true: .*dampening.*Type instead: optimizer.fused=false"):
        updater(model(), node, fused=True)
    updater(model(), {**node, "momentum": 0.0}, fused=True)


def test_weights_with_gaps_in_memory_are_refused() -> None:
    whole = torch.randn(4, 6)
    layouts = {"gaps": whole[:, :5], "transposed": whole.t(), "expanded": whole[:1].expand(4, 6), "one": whole[:, :1]}
    assert {name: is_dense(t) for name, t in layouts.items()} == {
        "gaps": False,
        "transposed": True,
        "expanded": False,
        "one": False,
    }
    with pytest.raises(UserError, match=r"a parameter of shape \(4, 5\) has gaps in memory"):
        optimizer_of({**CASES["adam"], "fused": True}, [(Rate(), [nn.Parameter(layouts["gaps"])])])


def test_why_an_optimizer_is_not_fused() -> None:
    one = [nn.Parameter(torch.zeros(2))]
    named = [("w", one[0])]
    torchs = torch.optim
    assert why_not(torchs.RMSprop(one), named) == "torch has no fused kernels for RMSprop"
    assert why_not(torchs.SGD(one, foreach=True), named) == "optimizer.foreach=true excludes fused kernels"
    assert "complex64" in why_not(torchs.Adam(one), [("w", torch.zeros(2, dtype=torch.complex64))])
    assert {why_not(kind(one), named) for kind in (torchs.SGD, torchs.Adam, torchs.AdamW, torchs.Adagrad)} == {""}
    assert why_not_by_auto(torchs.Adagrad(one), False) == "it fuses SGD, Adam and AdamW of torch"
    assert "tables" in why_not_by_auto(torchs.Adam(one), True) and not why_not_by_auto(torchs.Adam(one), False)


@pytest.mark.parametrize("typed", [[], ["execution.fused_optimizer=true"], ["+optimizer.fused=true"]])
def test_a_run_gets_the_optimizer_that_its_plan_names(typed: list[str]) -> None:
    run = ready("+recipe=digits_lenet", "strategy=single", "device=cpu", "optimizer=momentum", *typed).assignment
    made = Updaters(run.config, run.plan)(build_model(run.config, run.plan, torch.device("cpu")))
    assert is_fused(made.optimizer) == run.plan.chosen.fused_optimizer == bool(typed)
    assert len(made.optimizer.state) == (len(made.parameters) if typed else 0)
