"""Where a worker without a common step was when all stopped for a checkpoint: it goes on there, and does nothing
twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.saving import saver
from trainer.errors import Preempted
from trainer.host.signals import LEAVE
from trainer.worker import loop
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.nonfinite import Stop
from trainer.worker.training import Progress, Reporting, Schedule, Watchers

UPDATES = 5


def test_worker_that_waits_in_a_validation_is_behind_its_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may save there. Where work is split beforehand, a position before the epoch's updates would have it do them
    again."""

    def updates(epoch: int, first: int) -> Any:
        return iter([(1, iter(()))] * (UPDATES - first))

    def nothing(*arguments: Any) -> None:
        pass

    strategy = SimpleNamespace(
        evaluate=lambda: None,
        weight=lambda samples: 1.0,
        lr=0.1,
        synchronize=nothing,
        step=nothing,
        all_reduce_sum=lambda values: values,
    )
    run: Any = SimpleNamespace(
        progress=Progress(),
        over=False,
        captured=None,
        lockstep=False,
        watchers=Watchers(Stop()),
        strategy=strategy,
        forward=SimpleNamespace(train=nothing),
        feed=SimpleNamespace(updates=updates),
        reporting=Reporting(
            SimpleNamespace(doing=nothing, progress=nothing),  # type: ignore[arg-type]
            SimpleNamespace(begin_epoch=nothing, batches=0, next_log=99, line=None, stop_asked=False),  # type: ignore[arg-type]
        ),
        schedule=Schedule(epochs=2, total_steps=99, log_every=99, val_every=1, val_every_steps=0),
    )
    seen = []
    monkeypatch.setattr(loop, "validate", lambda run: seen.append((run.progress.epoch, run.progress.update)))
    monkeypatch.setattr(loop, "log_rest", nothing)
    loop._fit(run)
    assert seen == [(0, UPDATES), (1, UPDATES)], "where the epoch's last meeting is"
    assert (run.progress.epoch, run.progress.update) == (1, UPDATES), "where the run's last meeting is"


class Worker(SimpleNamespace):
    """A worker's training, as its checkpoints see it."""

    def __init__(self, meetings: int) -> None:
        strategy = SimpleNamespace(meetings=meetings, check_checkpoint=None, meet=lambda: None, members=lambda: (0, 2))
        super().__init__(strategy=strategy, lockstep=False, progress=Progress(epoch=1, step=7), over=False)


@pytest.mark.parametrize(("meetings", "stops"), [(3, False), (4, True)])
def test_worker_whose_meeting_is_over_stops_after_it(
    meetings: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is past its third meeting when it says that all stop. Whoever still waits for the answer is past
    it, too: its position would be before the meeting, which it would be at alone when all go on."""
    taken: list[int] = []
    monkeypatch.setattr(Checkpoints, "_take", lambda self, run, epoch: taken.append(run.strategy.meetings))
    first, other = saver(tmp_path, workers=2), saver(tmp_path, workers=2)
    first.settings.every_steps, other.seat, other.board = (
        7,
        SimpleNamespace(rank=1, size=2, store=first.seat.store),
        first.board,
    )
    first.check_due(Worker(3))  # type: ignore[arg-type]
    assert taken == [3]
    other.check_due(Worker(meetings), decides=False)  # type: ignore[arg-type]
    assert (len(taken) == 2) == stops
    other.asked = 0
    other.check_due(Worker(meetings))  # type: ignore[arg-type]  after its next update it stops anyway
    assert taken[-1] == meetings and len(taken) == 2 + stops


def test_early_worker_waits_for_the_end_of_an_epoch_where_it_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a validation nobody else holds it up. Two that stop for different reasons would meet at the same stop,
    and one of them alone at the next."""
    order: list[object] = []
    monkeypatch.setattr(Checkpoints, "_take", lambda self, run, epoch: order.append(epoch))
    kept, worker = saver(tmp_path, workers=2), Worker(3)
    kept.settings.every_epochs = 1
    worker.strategy.meet = lambda: order.append("meets")
    kept.after_epoch(worker)  # type: ignore[arg-type]
    assert order == ["meets", worker.progress.epoch + 1]


@pytest.mark.parametrize("waits", [True, False], ids=["the first waits", "all validate"])
def test_workers_without_a_common_step_leave_a_validation(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have met three times when it begins. Whoever has done its share waits at the fourth meeting, at which the
    first one may have all leave, and at no later one: others may have ended the validation there."""
    taken: list[int] = []
    monkeypatch.setattr(Checkpoints, "_take", lambda self, run, epoch: taken.append(run.strategy.meetings))
    first, other, early = (saver(tmp_path, workers=3) for _ in range(3))
    for kept in (other, early):
        kept.seat, kept.board = SimpleNamespace(rank=1, size=3, store=first.seat.store), first.board  # type: ignore[assignment]
    runs: dict[Checkpoints, Any] = {kept: Worker(3) for kept in (first, other, early)}
    for kept in (other, early):
        runs[kept].strategy.members = lambda: (1, 3)

    def share_is_done(kept: Checkpoints) -> None:
        kept.after_share(runs[kept])
        runs[kept].strategy.meetings = 4

    share_is_done(early)
    if waits:
        share_is_done(first)
    first.check_due(runs[first], decides=False)
    assert not first.board.check(["stop/0"]), "nobody has asked"
    first.seat.store.set(LEAVE, "")
    if waits:
        runs[first].strategy.meetings = 5
        first.check_due(runs[first], decides=False)
        assert not first.board.check(["stop/0"]), "the validation's last meeting"
        runs[first].strategy.meetings = 4
    for kept, how in ((first, waits), (early, True), (other, False)):
        with pytest.raises(Preempted):
            kept.check_due(runs[kept], decides=False) if how else kept.breaks_off(runs[kept])
    assert taken == [4 if waits else 3, 4, 3]


def test_no_checkpoint_is_due_within_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without a common step could not go on from there with it."""
    monkeypatch.setattr(Checkpoints, "_take", lambda *told: pytest.fail("saved"))
    kept, worker = saver(tmp_path), Worker(3)
    kept.settings.every_minutes = 1e-9
    kept.before = SimpleNamespace()  # type: ignore[assignment]
    assert not kept.breaks_off(worker)  # type: ignore[arg-type]
