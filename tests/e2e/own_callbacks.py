"""Callbacks that the tests configure by ``_target_``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.worker.callbacks import Event


class Recorder:
    """Writes each event's plain fields to ``events.RANK`` in the run's folder; worker 1 asks to stop after an
    update."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at

    def on_train_start(self, event: Any) -> None:
        self.write("start", event)

    def on_update_end(self, event: Any) -> None:
        assert event.model.training and event.loss.shape == () and not event.loss.requires_grad
        self.write("update", event, samples=event.samples, loss=event.loss.item())
        if event.step == self.stop_at and event.rank == 1:
            event.model.eval()  # a callback may forget to put it back
            event.stop("worker 1 has seen enough")

    def on_validation_end(self, event: Any) -> None:
        assert not event.model.training
        self.write("validation", event, metrics=event.metrics, improved=event.improved)

    def on_train_end(self, event: Any) -> None:
        self.write("end", event, metrics=event.metrics, ended=event.ended)

    def on_exception(self, event: Any) -> None:
        self.write("exception", event, error=str(event.error))

    def write(self, what: str, event: Event, **more: Any) -> None:
        names = ("rank", "world_size", "epoch", "step", "total_steps", "lr")
        line = {"what": what, **{name: getattr(event, name) for name in names}, **more}
        with (Path(event.run_dir) / f"events.{event.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Broken(Recorder):
    """Fails after the third update."""

    def on_update_end(self, event: Any) -> None:
        if event.step == 3:
            self.divide(event.step - 3)

    def divide(self, by: int) -> float:
        return 1 / by


class Misnamed:
    """Has a method of another framework."""

    def on_epoch_end(self, event: Any) -> None:
        raise AssertionError


class Idle:
    """Has none of the methods."""
