"""Every field of the position of a training is in a checkpoint, and comes back from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from tests.worker.test_loop import Recording, training
from trainer.strategies.contract import Share
from trainer.worker.state import load_state, save_state
from trainer.worker.training import Progress


class Stateless(Recording):
    """A strategy without a state of its own."""

    def load(self, folder: Path, share: Share) -> None:
        pass


class Reported:
    """A report without a state."""

    data_waited = 0.0

    def state(self) -> dict[str, float]:
        return {}

    def load(self) -> None:
        pass


def test_every_field_of_the_progress_is_saved_and_restored(tmp_path: Path) -> None:
    before, after = training([[2], [2]]), training([[2], [2]])
    for run in (before, after):
        run.strategy, run.reporting.report = Stateless(), Reported()
    others = {"validated": (3, {"loss": 0.5}), "val_sums": {"last": torch.ones(2)}, "rewinds": ((0, 1, 0, 2),)}
    kinds = {"int": 7, "bool": True, "str": "a callback asks for it"}
    for field in fields(Progress):
        setattr(before.progress, field.name, others.get(field.name, kinds.get(str(field.type))))
    part = save_state(before, Share({}, {}), before.progress.epoch, whole=True)
    load_state(after, tmp_path, part, part)
    assert vars(after.progress) == vars(before.progress) and None not in vars(after.progress).values()


def test_a_checkpoint_at_the_end_of_an_epoch_begins_the_next_one() -> None:
    run = training([[2], [2]])
    run.strategy, run.reporting.report = Stateless(), Reported()
    run.progress.epoch, run.progress.update = 4, 2
    assert save_state(run, Share({}, {}), 5, whole=True).progress.items() >= {"epoch": 5, "update": 0}.items()
