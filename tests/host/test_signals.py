"""What signals do while a job runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from trainer.config.instantiate import locate
from trainer.errors import AskedToLeave, Interrupted, RunFailed
from trainer.host.notes_board import NoNote
from trainer.host.signals import Grace, requests, termination_raises, undisturbed
from trainer.launch.forkserver import _asked_to_leave

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
SCHEDULERS = NUMBERS[:2]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a shell has told its background jobs to ignore is not ignored here; afterwards it is again."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_signal_that_ends_a_process_raises_and_the_callers_handler_is_put_back(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(Interrupted, match=f"got {number.name}"), termination_raises():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored_as_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_raises():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("can_go_on", [True, False])
def test_what_a_scheduler_sends_is_told_from_other_ends_where_a_run_can_go_on(
    number: signal.Signals, can_go_on: bool
) -> None:
    with pytest.raises(Interrupted) as raised, termination_raises(lambda: can_go_on):
        os.kill(os.getpid(), number)
    assert (raised.type is AskedToLeave) == (can_go_on and number in SCHEDULERS)


@pytest.mark.parametrize("number", SCHEDULERS, ids=lambda number: number.name)
def test_a_signal_during_an_import_is_no_error_of_the_module(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of any other code that takes each Exception for a mistake of the user's."""
    monkeypatch.setattr("importlib.import_module", lambda name: os.kill(os.getpid(), number))
    with pytest.raises(AskedToLeave, match=number.name), termination_raises(lambda: True):
        locate("slow.module:function")


@pytest.mark.parametrize("number", SCHEDULERS, ids=lambda number: number.name)
def test_request_before_there_is_something_to_save_ends_at_once_as_such(number: signal.Signals) -> None:
    with pytest.raises(AskedToLeave, match=number.name), termination_raises(lambda: True), requests(lambda: False):
        os.kill(os.getpid(), number)


def test_second_signal_leaves_unsaved_what_the_first_one_was_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.host.early_signals.AGAIN_S", 0.0)
    with pytest.raises(Interrupted) as raised, termination_raises(lambda: True), requests() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request
        os.kill(os.getpid(), signal.SIGUSR1)
    assert raised.type is Interrupted


def test_request_that_cannot_be_passed_on_shows_no_traceback_and_the_failure_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host 0 is gone, and this launcher has not found it out yet."""
    broke = list[object]()
    monkeypatch.setattr(threading, "excepthook", broke.append)
    asked = threading.Event()

    class Gone:
        def clone(self) -> Gone:
            asked.set()
            raise NoNote("the store of host 0: Connection refused")

    def fail() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(20)
        raise RunFailed("host 0 cannot be reached")

    with pytest.raises(RunFailed) as raised, _asked_to_leave(Grace(1000, lambda: True), [Gone()]):
        fail()
    assert raised.value.asked == "SIGTERM" and not broke and "saves a checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [*NUMBERS, signal.SIGINT], ids=lambda number: number.name)
def test_closing_is_undisturbed_by_each_of_them(number: signal.Signals) -> None:
    def fails(number: int, frame: object) -> None:
        raise AssertionError(number)

    before = signal.signal(number, fails)
    try:
        with undisturbed():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is fails
    finally:
        signal.signal(number, before)
