"""A line of a GPU comes when its numbers are there: the same line, in order, at the latest when the next one is due."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.test_loop import Lines, training
from trainer.errors import NotFinite
from trainer.worker import training_log
from trainer.worker.callbacks import Callbacks
from trainer.worker.loop import fit
from trainer.worker.training import Training
from trainer.worker.training_log import read_line

GROUPS = [[2], [3], [1], [2], [4], [2], [3]]


class Slow:
    """Numbers that come so many questions later, or when they are waited for."""

    questions = 10**9
    waits: list[Slow] = []

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self.left = [tensor.clone() for tensor in tensors], self.questions
        self.event: object | None = "not done"

    @property
    def there(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def read(self, wait_for: Any) -> list[torch.Tensor]:
        if self.event is not None and self.left > 0:
            self.waits.append(self)
        self.event, self.left = None, 0
        return self.tensors


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Slow]]:
    monkeypatch.setattr(training_log, "Arriving", Slow)
    monkeypatch.setattr(Slow, "questions", 10**9)
    monkeypatch.setattr(Slow, "waits", [])
    yield Slow


class Timed(Lines):
    """Lines, with the number of updates done when each was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[tuple[int, int]] = []
        self.dues: list[Any] = []

    def training(self, *arguments: Any, **more: Any) -> None:  # type: ignore[override]
        super().training(*arguments, **more)
        self.at.append((arguments[2], len(self.done)))
        self.dues.append(arguments[6])


def run_of(**schedule: Any) -> Training:
    run = training(GROUPS, **schedule)
    run.reporting.report = Timed()  # type: ignore[assignment]
    return run


@pytest.mark.parametrize("last_batch", [False, True])
def test_lines_are_those_of_a_cpu(slow: type[Slow], monkeypatch: pytest.MonkeyPatch, last_batch: bool) -> None:
    late = run_of(log_every=2, epochs=2, log_last_batch=last_batch)
    fit(late)
    monkeypatch.undo()
    at_once = run_of(log_every=2, epochs=2, log_last_batch=last_batch)
    fit(at_once)
    one, other = late.reporting.report, at_once.reporting.report
    assert one.trained == other.trained and len(one.trained) > 6  # type: ignore[attr-defined]
    assert (one.samples, one.validated) == (other.samples, other.validated)  # type: ignore[attr-defined]


def test_a_line_comes_at_the_latest_when_the_next_is_due_or_a_validation_comes(slow: type[Slow]) -> None:
    run = run_of(log_every=2, val_every_steps=4, val_every=0)
    fit(run)
    report: Any = run.reporting.report
    assert report.at == [(1, 3), (3, 4), (5, 7), (7, 7)], "(update, updates done when its line was printed)"
    assert len(slow.waits) == 4


def test_a_line_comes_as_soon_as_its_numbers_are_there(slow: type[Slow]) -> None:
    slow.questions = 2
    run = run_of(log_every=4)
    fit(run)
    report: Any = run.reporting.report
    assert report.at[:2] == [(1, 2), (5, 6)] and [due.clock for due in report.dues] == sorted(
        due.clock for due in report.dues
    )
    assert [line.tensors[2].item() for line in slow.waits] == [2 * (2 + 3)], "only the last one is waited for"


def test_a_checkpoint_has_the_line_before_it(slow: type[Slow]) -> None:
    run = run_of(log_every=4)
    seen: list[tuple[int, int]] = []

    class Saves:
        def after_update(self, run: Training) -> None:
            if run.progress.step == 2:
                read_line(run)
                seen.append((run.reporting.report.trained[-1][2], run.progress.step))  # type: ignore[attr-defined]

        def after_epoch(self, run: Training) -> None:
            pass

        validating = after_share = after_shares = breaks_off = None

    run.watchers.checkpoints = Saves()  # type: ignore[assignment]
    run.schedule = SimpleNamespace(**{**vars(run.schedule), "validate": False})  # type: ignore[assignment]
    fit(run)
    assert seen == [(1, 2)]


def test_a_loss_that_is_not_finite_ends_the_run_where_the_next_line_is_due(slow: type[Slow]) -> None:
    """The error names the update of the line, and the line is printed before."""
    run = run_of(log_every=2)
    run.watchers.step_hook.read_waits = lambda loss: True  # type: ignore[attr-defined]
    real, steps = run.strategy.step, iter(range(99))

    def step(samples: int) -> None:
        real(samples)
        if next(steps) == 1:  # the loss of the third update, whose line is the second
            with torch.no_grad():
                run.model.factor.fill_(math.nan)  # type: ignore[operator, union-attr]

    run.strategy.step = step  # type: ignore[method-assign]
    with pytest.raises(NotFinite) as refused:
        fit(run)
    report: Any = run.reporting.report
    assert refused.value.step == 3 and run.progress.step == 5
    assert [line[2] for line in report.trained] == [1, 3] and math.isnan(report.trained[-1][3]["loss"])


@pytest.mark.parametrize("reads", [None, 4])
def test_a_callback_ends_the_run_a_line_later(slow: type[Slow], reads: int | None) -> None:
    """Also where a checkpoint in between has read the line: it saves that one has asked."""

    class Stops:
        def on_update_end(self, event: Any) -> None:
            if event.step == 2:
                event.stop("enough")
            if event.step == reads:
                read_line(run)
                saved.append(run.reporting.window.state()["stop_asked"])

    saved: list[bool] = []
    run = run_of(log_every=2, val_every=0, epochs=2)
    run.watchers.callbacks = Callbacks([("stops", Stops())], 0, 1, None, 14, run.model)  # type: ignore[arg-type]
    run.strategy.all_reduce_sum = lambda values: values  # type: ignore[method-assign]
    fit(run)
    assert run.progress.step == 5 and run.progress.stop == "stopped by a callback at update 5: enough"
    assert run.reporting.report.ended == run.progress.stop
    assert saved == ([True] if reads else [])


@pytest.mark.parametrize("there", [True, False])
def test_a_failing_run_prints_the_line_whose_numbers_are_there(slow: type[Slow], there: bool) -> None:
    slow.questions = 3 if there else 10**9
    run = run_of(log_every=4)

    def step(samples: int) -> None:
        if run.progress.step == 2:
            raise MemoryError("no memory")

    run.strategy.step = step  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        fit(run)
    report: Any = run.reporting.report
    assert [line[2] for line in report.trained] == ([1] if there else []) and not slow.waits
