"""Optimizers, schedules, clipping and loss scaling do what torch's own do."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.strategies.entries import taking_part
from tests.strategies.launching import payload
from trainer.optim.by_name import by_name
from trainer.optim.schedules import Constant, Cosine, Step
from trainer.optim.updater import Updater
from trainer.strategies.seat import Seat
from trainer.worker.loop import fit
from trainer.worker.validation import validate

STEPS = 60


def torchs(make: Any, steps: int = STEPS) -> list[float]:
    """Learning rates of torch's scheduler, starting from 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no step of the optimizer, and SequentialLR's own deprecations
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


def ours(schedule: Constant) -> list[float]:
    return [schedule.factor(step) for step in range(STEPS)]


def test_constant_is_constant() -> None:
    assert ours(Constant(STEPS, 6)) == [1.0] * STEPS


def test_step_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.StepLR(o, step_size=12, gamma=0.3))
    assert ours(Step(STEPS, 6, every_epochs=2, gamma=0.3)) == pytest.approx(expected)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_equals_torchs(final: float) -> None:
    """The last update, and not the one after it, has the least rate."""
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS - 1, eta_min=final))
    assert ours(Cosine(STEPS, 6, final=final)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("start", [0.001, 0.25])
def test_warmup_equals_torchs_from_its_second_value_on(start: float) -> None:
    """Torch starts at ``start`` itself; ours takes the first step of the ramp at once, so that no update is lost on
    0."""
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, start_factor=start, total_iters=10), STEPS + 1)[1:]
    assert ours(Constant(STEPS, 6, warmup_steps=10, warmup_start=start)) == pytest.approx(expected)


def test_warmup_then_cosine_equals_torchs_sequence() -> None:
    def make(o: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.LinearLR(o, 0.01, total_iters=12), lr_scheduler.CosineAnnealingLR(o, STEPS - 13, 0.2)]
        return lr_scheduler.SequentialLR(o, parts, milestones=[12])

    expected, schedule = torchs(make), Cosine(STEPS, 6, final=0.2, warmup_epochs=2, warmup_start=0.01)
    assert [schedule.factor(step) for step in range(11)] == pytest.approx(expected[1:12])
    assert [schedule.factor(step) for step in range(12, STEPS)] == pytest.approx(expected[12:])
    assert schedule.factor(11) == pytest.approx(1.0)


def test_schedules_hold_after_their_end_and_without_a_length() -> None:
    assert Cosine(10, 2, final=0.3).factor(1000) == pytest.approx(0.3)
    assert Cosine(1, 1, warmup_steps=1).factor(0) == 1.0
    assert Step(10, 1, every_epochs=0.1, gamma=0.5).factor(3) == 0.125
    assert Constant(10, 3, warmup_epochs=1.0, warmup_steps=0).factor(0) == 1.0


def model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def give_gradients(module: nn.Module, step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in module.parameters():
        p.grad = size * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_updater_equals_torchs_optimizer_scheduler_and_clipping() -> None:
    own, theirs = model(), model()
    schedule = Cosine(20, 5)
    groups = [
        [{"params": [m.weight], "lr": 0.1}, {"params": [m.bias], "lr": 0.5, "weight_decay": 0.1}] for m in (own, theirs)
    ]
    updater = Updater(torch.optim.SGD(groups[0], momentum=0.9), schedule.factor, clip_norm=1.5)
    optimizer = torch.optim.SGD(groups[1], momentum=0.9)
    scheduler = lr_scheduler.LambdaLR(optimizer, schedule.factor)
    norms = []
    for step in range(20):
        give_gradients(own, step, 0.5), give_gradients(theirs, step, 0.5)
        assert updater.lr == pytest.approx(scheduler.get_last_lr()[0])
        updater.step()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.5)))
        optimizer.step()
        scheduler.step()
        assert all(p.grad is None for p in own.parameters())
        for one, other in zip(own.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)
    assert min(norms) < 1.5 < max(norms)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_loss_scaler_skips_an_update_with_a_gradient_that_is_no_number(bad: float, clip_norm: float | None) -> None:
    net = model()
    updater = Updater(torch.optim.SGD(net.parameters(), 0.1), lambda step: 1.0, clip_norm, loss_scaling=True)
    start = [p.detach().clone() for p in net.parameters()]
    updater.backward(net(torch.full((1, 3), bad, dtype=torch.float64)).sum())
    updater.step()
    assert all(torch.equal(p, before) for p, before in zip(net.parameters(), start, strict=True))
    assert updater.scaler is not None and updater.scaler.get_scale() == 2.0**15
    assert updater.steps == 1 and all(p.grad is None for p in net.parameters())
    updater.backward(net(torch.ones(1, 3, dtype=torch.float64)).sum())
    updater.step()
    assert not any(torch.equal(p, before) for p, before in zip(net.parameters(), start, strict=True))


def test_loss_scaling_changes_no_step() -> None:
    plain, scaled = model(), model()
    updaters = [
        Updater(torch.optim.SGD(m.parameters(), 0.1), lambda step: 1.0, 0.5, loss_scaling=on)
        for m, on in ((plain, False), (scaled, True))
    ]
    for net, updater in zip((plain, scaled), updaters, strict=True):
        updater.backward(net(torch.ones(1, 3, dtype=torch.float64)).square().sum())
        updater.step()
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("name", ["Adam", "adamw", "RMSprop"])
def test_any_optimizer_of_torch_by_name(name: str) -> None:
    optimizer = by_name([torch.zeros(1, requires_grad=True)], name=name, lr=0.25)
    assert type(optimizer).__name__.lower() == name.lower()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_unknown_optimizer_is_named_with_the_nearest() -> None:
    with pytest.raises(Exception, match=r"(?s)Adm.*optimizer\.name=Adam"):
        by_name([torch.zeros(1, requires_grad=True)], name="Adm", lr=0.1)


@pytest.mark.parametrize(
    ("precision", "parameters", "outputs"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
    ],
)
def test_precision_is_used_and_the_loss_falls(precision: str, parameters: Any, outputs: Any) -> None:
    handed = payload("single", 1, (f"precision={precision}", "max_steps=40", "optimizer.weight_decay=0"))
    seen = set()
    with taking_part(Seat("worker", 0, 1, 0, 1, "cpu", None), handed) as run:
        run.model.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
        assert {p.dtype for p in run.model.parameters()} == {parameters}
        before = validate(run)["loss"]
        assert before == pytest.approx(np.log(7), rel=0.2)
        after = fit(run)["loss"]
        assert (run.strategy.updater.scaler is not None) == (precision == "fp16")
    assert seen == {outputs}
    assert after < 0.5 * before
