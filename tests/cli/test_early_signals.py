"""A signal ends a command in order whenever it comes, also before the job has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs import environment
from trainer.cli.sweep import Sweep
from trainer.errors import AskedToLeave, Interrupted, RunPreempted
from trainer.host import early_signals
from trainer.host.signals import termination_raises
from trainer.planning.resume import can_go_on

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
AT_IMPORT = """
import os, runpy, signal, sys
moment, number = sys.argv[1], int(sys.argv[2])

class Signals:
    "Sends the signal when a module is looked for, before any of it is there."

    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.meta_path.insert(0, Signals())
sys.argv[1:] = sys.argv[3:]
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""
DIGITS = ["+recipe=digits_lenet", "tracking=none", "hydra.run.dir=run"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("moment", "number", "argv"),
    [
        ("trainer.terminal.streams", signal.SIGTERM, DIGITS),
        ("torch.nn", signal.SIGUSR1, DIGITS),
        ("hydra.types", signal.SIGINT, [*DIGITS, "mode=eval", "weights=none"]),
        ("hydra.core.plugins", signal.SIGTERM, ["-m", *DIGITS, "seed=1,2"]),
        ("torch._C", signal.SIGINT, [*DIGITS, "plan=true"]),
        ("trainer.cli.help", signal.SIGHUP, ["--help"]),
    ],
)
def test_signal_before_the_job_begins_ends_the_command_with_its_code_and_one_sentence(
    moment: str, number: signal.Signals, argv: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", AT_IMPORT, moment, str(int(number)), *argv]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    asked = number in (signal.SIGTERM, signal.SIGUSR1)
    assert done.returncode == (75 if asked else 130), done.stderr
    how, again = ("preempted", ". The same command begins again") if asked else ("interrupted", "")
    assert done.stderr == f"{how}: got {number.name} before anything was begun: nothing was saved{again}\n"
    assert list(tmp_path.iterdir()) == []


def test_early_handler_is_no_handler_of_forks_and_of_signals_that_are_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    early_signals.take()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_jobs_handlers_take_over_and_what_comes_after_them_changes_nothing(number: signal.Signals) -> None:
    early_signals.take()
    expected = KeyboardInterrupt if number == signal.SIGINT else Interrupted
    with pytest.raises(expected), termination_raises():
        early_signals.leave_to_job()
        os.kill(os.getpid(), number)
    assert early_signals.is_early(signal.getsignal(number))
    os.kill(os.getpid(), number)  # the job has ended


def test_scheduler_ends_a_sweep_between_two_jobs_as_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(*args: Any) -> None:
        raise AskedToLeave("got SIGTERM")

    point: Any = None
    sweep = Sweep(point, [], [], Path("sweep"), [[]], [point], set())
    monkeypatch.setattr(sweep, "_job", job)
    with pytest.raises(RunPreempted, match="got SIGTERM between two jobs") as raised:
        sweep._run_jobs()
    assert raised.value.exit_code == AskedToLeave.exit_code == 75


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_what_trains_nothing_can_be_done_again(mode: str) -> None:
    config: Any = SimpleNamespace(mode=mode)
    assert can_go_on(config, SimpleNamespace(node_rank=1))  # type: ignore[arg-type]
