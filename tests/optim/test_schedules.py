"""The further schedules are torch's own, with a warm-up before any of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from trainer.optim.schedules import Constant, Cosine, MultiStep, OneCycle, Plateau, Polynomial, Step
from trainer.optim.updater import Updater

STEPS, PER_EPOCH = 60, 6


def torchs(make: Callable[[torch.optim.Optimizer], Any], steps: int = STEPS) -> list[float]:
    """Learning rates of torch's scheduler over so many updates, where the greatest is 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scheduler, rates = make(optimizer), []
        for step in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            if step + 1 < steps:
                scheduler.step()
    return rates


def ours(schedule: Constant, start: int = 0) -> list[float]:
    return [schedule.factor(step) for step in range(start, STEPS)]


def test_multistep_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.MultiStepLR(o, milestones=[12, 27, 48], gamma=0.3))
    assert ours(MultiStep(STEPS, PER_EPOCH, [2, 4.5, 8], gamma=0.3)) == pytest.approx(expected)


@pytest.mark.parametrize("milestones", [[], [0, 3], [5, 3], [3, 3], [-1]])
def test_milestones_that_do_not_rise_are_refused(milestones: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0 that rise"):
        MultiStep(STEPS, PER_EPOCH, milestones)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_equals_torchs(power: float) -> None:
    expected = torchs(lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS - 1, power=power))
    assert ours(Polynomial(STEPS, PER_EPOCH, power=power)) == pytest.approx(expected)
    least = ours(Polynomial(STEPS, PER_EPOCH, power=power, final=0.2))
    assert least == pytest.approx([0.2 + 0.8 * rate for rate in expected])


@pytest.mark.parametrize("total", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("kind", [Cosine, Polynomial, OneCycle])
def test_last_update_has_the_final_factor(kind: Any, warmup: int, total: int) -> None:
    """As the key says. Before, cosine and polynomial had it after the end of the run."""
    schedule = kind(total, 1, final=0.01, warmup_steps=warmup)
    if warmup < total:
        assert schedule.factor(total - 1) == pytest.approx(0.01) == schedule.factor(total + 5)
        assert not list(schedule.concerns())
    if warmup < total - 4 or (
        kind is not OneCycle and warmup < total - 1
    ):  # a rise within three updates has passed its first
        assert schedule.factor(warmup) == pytest.approx(schedule.first)


TOO_LATE = [
    (
        Constant(6, 44, warmup_epochs=1.0),
        "the warm-up (44 updates) is longer than the run (6): the learning rate ends at 0.14 of its value",
    ),
    (
        Cosine(6, 44, warmup_steps=6),
        "the warm-up (6 updates) is as long as the run: nothing of the schedule after it is left",
    ),
    (
        MultiStep(60, 6, [5.0, 30.0, 60.0]),
        "scheduler.milestones has epochs after the end of the run (10 epochs): 30, 60 never come",
    ),
    (
        MultiStep(60, 6, [10.0]),
        (
            "scheduler.milestones has epochs after the end of the run (10 epochs): 10 never come and the learning "
            "rate stays as it is"
        ),
    ),
    (
        Step(60, 6),
        (
            "the first drop of the learning rate, after 180 updates (scheduler.every_epochs), is not in the run "
            "(60): it stays as it is"
        ),
    ),
    (OneCycle(60, 6, rise=1.0), "scheduler.rise=1 leaves no update for the way down: scheduler.final is not reached"),
]


@pytest.mark.parametrize(("schedule", "said"), TOO_LATE)
def test_what_comes_after_the_end_of_the_run_is_said(schedule: Constant, said: str) -> None:
    assert list(schedule.concerns()) == [said]
    rates = [schedule.factor(step) for step in range(schedule.total_steps)]
    if "stays as it is" in said:
        assert set(rates) == {1.0}
    if isinstance(schedule, Constant) and "0.14" in said:
        assert max(rates) == rates[-1] == pytest.approx(6 / 44)


def test_what_a_run_is_long_enough_for_is_not_said() -> None:
    fine = (
        MultiStep(60, 6, [9.9]),
        Step(61, 6, every_epochs=10),
        Constant(60, 6, warmup_steps=59),
        Cosine(60, 6),
        Plateau(60, 6),
    )
    assert not any(list(schedule.concerns()) for schedule in fine)


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("rise", [0.3, 0.05, 0.0, 1.0])
def test_one_cycle_equals_torchs(anneal: str, rise: float) -> None:
    def make(o: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(
            o,
            max_lr=1.0,
            total_steps=STEPS,
            pct_start=rise,
            anneal_strategy=anneal,
            cycle_momentum=False,
            div_factor=10,
            final_div_factor=100,
        )

    schedule = OneCycle(STEPS, PER_EPOCH, rise=rise, initial=0.1, final=0.001, anneal=anneal)
    expected = torchs(make)
    if rise == 0.0:  # torch begins in the middle of a phase that ends before the first update
        assert schedule.factor(0) == pytest.approx(expected[0], abs=0.05)
    else:
        assert ours(schedule) == pytest.approx(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda **w: Constant(STEPS, PER_EPOCH, **w),
        lambda **w: Step(STEPS, PER_EPOCH, every_epochs=5, gamma=0.5, **w),
        lambda **w: MultiStep(STEPS, PER_EPOCH, [4, 7], **w),
        lambda **w: Cosine(STEPS, PER_EPOCH, final=0.1, **w),
        lambda **w: OneCycle(STEPS, PER_EPOCH, initial=0.2, **w),
        lambda **w: Polynomial(STEPS, PER_EPOCH, power=2.0, **w),
        lambda **w: Plateau(STEPS, PER_EPOCH, **w),
    ],
    ids=["constant", "step", "multistep", "cosine", "one_cycle", "polynomial", "plateau"],
)
def test_linear_warmup_comes_before_any_of_them(make: Callable[..., Constant]) -> None:
    schedule = make(warmup_epochs=2.0, warmup_start=0.1)
    first = schedule.first
    ramp = [first * (0.1 + 0.9 * (step + 1) / 12) for step in range(12)]
    assert [schedule.factor(step) for step in range(12)] == pytest.approx(ramp)
    assert schedule.factor(12) == pytest.approx(first)
    if isinstance(schedule, (Cosine, OneCycle, Polynomial)):  # these have what is left of the run
        shorter = make(warmup_epochs=0.0)
        shorter.total_steps = STEPS - 12
        assert ours(schedule, 12) == pytest.approx([shorter.factor(step) for step in range(STEPS - 12)])


@pytest.mark.parametrize("metric", ["val/loss", "val/acc1"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateau_equals_torchs(metric: str, cooldown: int) -> None:
    generator = np.random.default_rng(4)
    curve = np.exp(-np.arange(STEPS) / 8) + 0.05 * generator.normal(size=STEPS)
    curve = curve if metric == "val/loss" else -curve
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode="min" if metric == "val/loss" else "max",
        factor=0.5,
        patience=2,
        threshold=0.01,
        threshold_mode="abs",
        cooldown=cooldown,
        min_lr=0.02,
    )
    own = Plateau(STEPS, PER_EPOCH, metric, gamma=0.5, patience=2, min_delta=0.01, cooldown=cooldown, least=0.02)
    seen = []
    for step, value in enumerate(curve):
        theirs.step(value)
        own.observe(step, {metric: float(value), "val/other": 0.0})
        seen.append(own.factor(step))
        assert seen[-1] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert seen[0] == 1.0 and seen[-1] == 0.02 and len(set(seen)) > 4


def test_plateau_counts_no_validation_of_the_warmup() -> None:
    schedule = Plateau(STEPS, PER_EPOCH, "val/loss", patience=0, warmup_steps=10)
    for step in (2, 4, 6, 8):
        schedule.observe(step, {"val/loss": 1.0})
    assert schedule.factor(10) == 1.0
    for step in (12, 14, 16):
        schedule.observe(step, {"val/loss": 1.0})
    assert schedule.factor(20) == pytest.approx(0.01)


def test_a_validation_that_is_no_number_is_no_better_one() -> None:
    schedule = Plateau(STEPS, PER_EPOCH, "val/loss", patience=0, gamma=0.5)
    schedule.observe(1, {"val/loss": math.nan})
    assert schedule.factor(1) == 0.5


def test_the_updater_tells_its_plateau() -> None:
    schedule = Plateau(STEPS, PER_EPOCH, "val/loss", patience=0, gamma=0.5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    updater = Updater(optimizer, schedule.factor, plateau=schedule)
    for step in range(3):
        updater.observe(step, {"val/loss": 1.0})
    assert updater.lr == pytest.approx(0.1)
