"""Learning-rate schedules as pure functions of the update number, the same wherever the optimizer runs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.metrics.best import Best
from trainer.wording import counted

PLATEAU = "trainer.optim.schedules.Plateau"
"""The schedule that depends on validations."""


class Constant:
    """scheduler=constant: a constant learning rate after an optional linear warm-up; base of the other schedules.

    Args:
        total_steps: updates of the whole run.
        steps_per_epoch: updates of one epoch.
        warmup_epochs, warmup_steps: length of the linear warm-up from ``warmup_start`` to 1; give one of the two.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        warmup_start: float = 0.0,
    ) -> None:
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.warmup = warmup_steps if warmup_steps is not None else round(warmup_epochs * steps_per_epoch)
        self.warmup_start = warmup_start

    def factor(self, step: int) -> float:
        """The factor on ``optimizer.lr`` for update number ``step``, from 0."""
        if step < self.warmup:
            return self.first * (self.warmup_start + (1.0 - self.warmup_start) * (step + 1) / self.warmup)
        return self.after_warmup(step)

    @property
    def first(self) -> float:
        """The factor at which the warm-up ends."""
        return 1.0

    @property
    def length(self) -> int:
        """The number of updates after the warm-up."""
        return max(1, self.total_steps - self.warmup)

    def progress(self, step: int) -> float:
        """The progress after the warm-up at update number ``step``: from 0 at its first to 1 at the run's last."""
        return min(1.0, (step - self.warmup) / (self.length - 1)) if self.length > 1 else 1.0

    def after_warmup(self, step: int) -> float:
        """The schedule's factor after the warm-up; ``step`` counts from the start of the run."""
        return 1.0

    def concerns(self) -> Iterator[str]:
        """Yield what of the schedule this run is too short for, each a clause."""
        if self.warmup > self.total_steps:
            last = self.factor(self.total_steps - 1)
            yield (
                f"the warm-up ({counted(self.warmup, 'update')}) is longer than the run ({self.total_steps}): the "
                f"learning rate ends at {last:.2g} of its value"
            )
        elif self.warmup == self.total_steps:
            yield (
                f"the warm-up ({counted(self.warmup, 'update')}) is as long as the run: nothing of the schedule "
                f"after it is left"
            )
        else:
            yield from self.too_late()

    def too_late(self) -> Iterator[str]:
        """Yield what would come after the end of the run, each a clause."""
        yield from ()


class Step(Constant):
    """scheduler=step: multiplied by ``gamma`` every ``every_epochs`` epochs."""

    def __init__(
        self, total_steps: int, steps_per_epoch: int, every_epochs: float = 30.0, gamma: float = 0.1, **warmup: float
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.every = max(1, round(every_epochs * steps_per_epoch))
        self.gamma = gamma

    def after_warmup(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))

    def too_late(self) -> Iterator[str]:
        if self.every >= self.total_steps:
            yield (
                f"the first drop of the learning rate, after {counted(self.every, 'update')} "
                f"(scheduler.every_epochs), is not in the run ({self.total_steps}): it stays as it is"
            )


class Cosine(Constant):
    """scheduler=cosine: half a cosine from 1 to ``final`` at the last update (Loshchilov & Hutter, 2017)."""

    def __init__(self, total_steps: int, steps_per_epoch: int, final: float = 0.0, **warmup: float) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.final = final

    def after_warmup(self, step: int) -> float:
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * self.progress(step)))


class MultiStep(Constant):
    """scheduler=multistep: multiplied by ``gamma`` at each of the epochs ``milestones``, from the run's start."""

    def __init__(
        self, total_steps: int, steps_per_epoch: int, milestones: list[float], gamma: float = 0.1, **warmup: float
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        if not milestones or any(
            later <= sooner for sooner, later in zip([0.0, *milestones], milestones, strict=False)
        ):
            raise ValueError(f"milestones must be epochs above 0 that rise, not {milestones}")
        self.epochs = milestones
        self.milestones = [round(epochs * steps_per_epoch) for epochs in milestones]
        self.gamma = gamma

    def after_warmup(self, step: int) -> float:
        return float(self.gamma ** bisect.bisect_right(self.milestones, step))

    def too_late(self) -> Iterator[str]:
        if late := [n for n, step in enumerate(self.milestones) if step >= self.total_steps]:
            epochs = ", ".join(f"{self.epochs[n]:g}" for n in late)
            none = " and the learning rate stays as it is" if len(late) == len(self.milestones) else ""
            yield (
                f"scheduler.milestones has epochs after the end of the run "
                f"({self.total_steps / self.steps_per_epoch:.3g} epochs): {epochs} never come{none}"
            )


class Polynomial(Constant):
    """scheduler=polynomial: from 1 after the warm-up to ``final`` at the last update, as a power of what is left."""

    def __init__(
        self, total_steps: int, steps_per_epoch: int, power: float = 1.0, final: float = 0.0, **warmup: float
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.power, self.final = power, final

    def after_warmup(self, step: int) -> float:
        return float(self.final + (1.0 - self.final) * (1.0 - self.progress(step)) ** self.power)


class Exponential(Constant):
    """scheduler=exponential: from 1 after the warm-up to ``final`` at the last update, by one factor an update."""

    def __init__(self, total_steps: int, steps_per_epoch: int, final: float = 0.01, **warmup: float) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.final = final

    def after_warmup(self, step: int) -> float:
        return float(self.final ** self.progress(step))


class OneCycle(Constant):
    """scheduler=one_cycle: up from ``initial`` to 1, in the share ``rise`` of the updates, then down to ``final`` at
    the last. After Smith & Topin (2019).

    As torch's OneCycleLR with two phases and without its cycle of the momentum. A warm-up leads to ``initial``.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        rise: float = 0.3,
        initial: float = 0.04,
        final: float = 4e-6,
        anneal: str = "cos",
        **warmup: float,
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.rise, self.initial, self.final, self.anneal = rise, initial, final, anneal

    @property
    def first(self) -> float:
        return self.initial

    def after_warmup(self, step: int) -> float:
        step, top, end = step - self.warmup, self.rise * self.length - 1, self.length - 1
        if step <= top:
            return self._between(self.initial, 1.0, step / top if top > 0 else 1.0)
        return self._between(1.0, self.final, min(1.0, (step - top) / (end - top)) if end > top else 1.0)

    def too_late(self) -> Iterator[str]:
        if self.rise == 1.0:
            yield "scheduler.rise=1 leaves no update for the way down: scheduler.final is not reached"

    def _between(self, start: float, end: float, progress: float) -> float:
        if self.anneal == "linear":
            return start + (end - start) * progress
        return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Plateau(Constant):
    """scheduler=plateau: multiplied by ``gamma`` when a validation metric stops getting better (ReduceLROnPlateau).

    A process that applies the schedule observes all validations, or gets ``scale`` from a process that does.

    Args:
        metric: e.g. ``val/loss``; its name tells whether less is better.
        patience: validations without a better value before the rate falls: one more lowers it.
        min_delta: least difference that counts as better.
        cooldown: validations after a drop that are not counted.
        least: smallest factor.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        metric: str = "val/loss",
        gamma: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        least: float = 0.0,
        **warmup: float,
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.best = Best(metric, min_delta)
        self.gamma, self.patience, self.cooldown, self.least = gamma, patience, cooldown, least
        self.scale, self.bad, self.resting = 1.0, 0, 0

    def after_warmup(self, step: int) -> float:
        return self.scale

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the validation after ``step`` updates; those during the warm-up do not count."""
        if step < self.warmup or self.best.metric not in metrics:
            return
        self.bad = 0 if self.best.improved(step, metrics[self.best.metric]) else self.bad + 1
        if self.resting:
            self.resting, self.bad = self.resting - 1, 0
        if self.bad > self.patience:
            self.scale, self.resting, self.bad = max(self.least, self.scale * self.gamma), self.cooldown, 0

    def state(self) -> dict[str, Any]:
        """The current scale, and what past validations left, for :meth:`load`."""
        best, metric = self.best.state(), self.best.metric
        return {"scale": self.scale, "bad": self.bad, "resting": self.resting, "best": best, "metric": metric}

    def load(self, scale: float, bad: int, resting: int, best: tuple[float | None, int], metric: str) -> None:
        """Restore what :meth:`state` returned; the scale alone if it is of another metric."""
        self.scale = scale
        if metric == self.best.metric:
            self.bad, self.resting = bad, resting
            self.best.load(best)

    def forget(self) -> None:
        """Forget the best value and the validations since; the scale stays."""
        self.bad = self.resting = 0
        self.best.load((None, 0))


def is_plateau(target: str) -> bool:
    """Whether a ``_target_`` is the schedule Plateau, which depends on a validation metric (as early stop does)."""
    return target == PLATEAU
