"""What signals do while a job runs."""

import os
import signal
from collections.abc import Iterator

import pytest

from trainer.errors import Interrupted
from trainer.host.signals import termination_raises

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
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
