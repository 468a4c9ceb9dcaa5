"""When a checkpoint is due: by minutes, by epochs, by updates."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.checkpoint.saving import saver
from trainer.worker import checkpoints
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.training import Progress

UPDATES = 9
"""Of an epoch, as ``saver`` has it."""


class Rhythm:
    """A worker alone whose checkpoints are counted, and its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, lockstep: bool, **told: Any) -> None:
        self.now, self.taken, self.goes_on = 0.0, [], []
        self.run: Any = SimpleNamespace(
            lockstep=lockstep,
            progress=Progress(),
            over=False,
            strategy=SimpleNamespace(members=lambda: (0, 1), meetings=0, check_checkpoint=None),
        )
        self.kept = saver(folder)
        self.kept.clock, self.kept.saved_at = lambda: self.now, 0.0
        vars(self.kept.settings).update({"every_minutes": None, "every_epochs": None, "every_steps": None, **told})

        def take(kept: Checkpoints, run: Any, epoch: int) -> None:
            self.taken.append(run.progress.step)
            self.goes_on.append(epoch)
            kept.saved, kept.saved_after, kept.saved_at = run.progress.step, run.progress.step, self.now

        monkeypatch.setattr(Checkpoints, "_take", take)

    def update(self) -> None:
        self.run.progress.step += 1
        self.run.progress.update += 1
        self.kept.after_update(self.run)

    def epoch(self) -> None:
        progress = self.run.progress
        while progress.update < UPDATES:
            self.update()
        self.kept.after_epoch(self.run)
        progress.epoch, progress.update = progress.epoch + 1, 0


@pytest.mark.parametrize("lockstep", [True, False])
def test_minutes_count_from_the_checkpoint_before(
    lockstep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rhythm = Rhythm(tmp_path, monkeypatch, lockstep, every_minutes=1.0)
    for seconds, saved in ((59, []), (60, [2]), (119, [2]), (121, [2, 4]), (180, [2, 4]), (181, [2, 4, 6])):
        rhythm.now = float(seconds)
        rhythm.update()
        assert rhythm.taken == saved, seconds


@pytest.mark.parametrize("lockstep", [True, False])
def test_every_second_epoch_and_the_last_one(lockstep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rhythm = Rhythm(tmp_path, monkeypatch, lockstep, every_epochs=2)
    rhythm.kept.epochs = 5
    for _ in range(5):
        rhythm.epoch()
    assert rhythm.taken == [2 * UPDATES, 4 * UPDATES, 5 * UPDATES]


def test_epochs_and_updates_that_meet_are_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rhythm = Rhythm(tmp_path, monkeypatch, True, every_epochs=1, every_steps=3)
    rhythm.epoch()
    rhythm.epoch()
    assert rhythm.taken == [3, 6, 9, 12, 15, 18]
    assert rhythm.goes_on == [0, 0, 1, 1, 1, 2], "at an epoch's end it comes after the validation"


@pytest.mark.parametrize("halts", [True, False])
def test_a_disk_that_is_still_writing_is_said(
    halts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where workers halt for a checkpoint, as with parameter servers of sync, none is left out: the training waits."""
    kept, waits = saver(tmp_path), list[float | None]()
    monkeypatch.setattr(checkpoints, "check_parameters", lambda run: None)
    monkeypatch.setattr(checkpoints, "read_line", lambda run: None)
    kept.writer = SimpleNamespace(wait=lambda seconds=None: waits.append(seconds) or seconds is None)  # type: ignore[assignment]
    halt = Mock(side_effect=InterruptedError)
    strategy = SimpleNamespace(halts=halts, halt=halt, members=lambda: (0,))
    run: Any = SimpleNamespace(progress=Progress(step=40), over=False, lockstep=True, strategy=strategy)
    with pytest.raises(InterruptedError) if halts else nullcontext():
        kept._copy(run, 0)
    what, again = ("the checkpoint waits", [None]) if halts else ("no checkpoint", [])
    assert capsys.readouterr().out == f"{what} at update 40: the one before is still being written\n"
    assert waits == [checkpoints.SLOW_S, *again] and halt.called == halts
