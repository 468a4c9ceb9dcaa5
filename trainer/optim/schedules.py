"""Learning-rate schedules as pure functions of the update's number, so that they hold wherever the optimizer runs."""

from __future__ import annotations

import math


class Constant:
    """The same learning rate throughout, after an optional linear warm-up; the base of the other schedules.

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
        """Factor on ``optimizer.lr`` for update number ``step``, from 0."""
        if step < self.warmup:
            return self.warmup_start + (1.0 - self.warmup_start) * (step + 1) / self.warmup
        return self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        """The schedule itself; ``step`` counts from the start of the run."""
        return 1.0


class Step(Constant):
    """Multiplied by ``gamma`` every ``every_epochs`` epochs."""

    def __init__(
        self, total_steps: int, steps_per_epoch: int, every_epochs: float = 30.0, gamma: float = 0.1, **warmup: float
    ) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.every = max(1, round(every_epochs * steps_per_epoch))
        self.gamma = gamma

    def after_warmup(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))


class Cosine(Constant):
    """Half a cosine from 1 after the warm-up to ``final`` after the last update (Loshchilov & Hutter, 2017)."""

    def __init__(self, total_steps: int, steps_per_epoch: int, final: float = 0.0, **warmup: float) -> None:
        super().__init__(total_steps, steps_per_epoch, **warmup)  # type: ignore[arg-type]
        self.final = final

    def after_warmup(self, step: int) -> float:
        length = max(1, self.total_steps - self.warmup)
        progress = min(1.0, (step - self.warmup) / length)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
