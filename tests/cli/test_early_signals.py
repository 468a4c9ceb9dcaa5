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

from tests import pace
from tests.runs import environment
from trainer.cli.sweep import Sweep
from trainer.errors import AskedToLeave, Interrupted, RunPreempted
from trainer.host import early_signals
from trainer.host.signals import termination_raises
from trainer.planning.find_checkpoint import can_go_on

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
NOBODY_READS = """
import contextlib, os, sys, time
from trainer.host import early_signals, signals
from trainer.terminal import streams

early_signals.install()
with streams.guarded():
    for step in sys.argv[1].split():
        if step == "job":
            early_signals.job_begins()
        elif step == "ended":
            early_signals.job_ended(0)
    with signals.undisturbed() if "closes" in sys.argv[1] else contextlib.nullcontext():
        os.write(int(sys.argv[2]), b"!")
        if "sleeps" in sys.argv[1]:
            time.sleep(60)
        print("x" * 100_000, flush=True)
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
        *(
            pytest.param(*other, marks=pytest.mark.all)
            for other in (
                ("hydra.core.plugins", signal.SIGTERM, ["-m", *DIGITS, "seed=1,2"]),
                ("torch._C", signal.SIGINT, [*DIGITS, "plan=true"]),
                ("trainer.cli.help", signal.SIGHUP, ["--help"]),
            )
        ),
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
    early_signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_jobs_handlers_take_over_and_what_comes_after_them_changes_nothing(number: signal.Signals) -> None:
    early_signals.install()
    expected = KeyboardInterrupt if number == signal.SIGINT else Interrupted
    with pytest.raises(expected), termination_raises():
        early_signals.job_begins()
        os.kill(os.getpid(), number)
    assert early_signals.is_early(signal.getsignal(number))
    os.kill(os.getpid(), number)  # the job has ended


@pytest.mark.parametrize(
    "both", [False, pytest.param(True, marks=pytest.mark.all)], ids=["stdout", "stdout and stderr"]
)
@pytest.mark.parametrize(
    ("steps", "number", "code"),
    [
        ("plan", signal.SIGTERM, 75),
        ("job", signal.SIGHUP, 130),
        ("job ended", signal.SIGTERM, 0),
        ("job closes", signal.SIGTERM, 75),
    ],
)
def test_signal_ends_a_command_that_waits_for_a_reader(
    steps: str, number: signal.Signals, code: int, both: bool
) -> None:
    reader, screen = os.pipe()
    process, said = waiting(steps, screen, screen if both else subprocess.PIPE)
    process.send_signal(number)
    try:
        assert process.wait(20) == code
        late = "before anything was begun" if steps == "plan" else "before all lines were printed"
        assert said is None or f"got {number.name} {late}" in said.read()
    finally:
        process.kill()
        process.wait()
        for end in (reader, screen):
            os.close(end)


def test_second_signal_after_the_job_ends_the_command_whatever_it_waits_for() -> None:
    process, _ = waiting("job ended sleeps", subprocess.DEVNULL, subprocess.PIPE)
    try:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(early_signals.AGAIN_S + 0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def waiting(steps: str, out: int, error: int) -> tuple[subprocess.Popen[str], Any]:
    """A command that has come to its last lines; its standard error, if that is a pipe."""
    ready, began = os.pipe()
    command = [sys.executable, "-c", NOBODY_READS, steps, str(began)]
    process = subprocess.Popen(command, env=environment(), stdout=out, stderr=error, text=True, pass_fds=[began])
    os.close(began)
    assert os.read(ready, 1)
    os.close(ready)
    pace.wait_for(lambda: asleep(process.pid), 20, "it waits")
    return process, process.stderr


def asleep(pid: int) -> bool:
    """Whether a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_scheduler_ends_a_sweep_between_two_jobs_as_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(*args: Any) -> None:
        raise AskedToLeave("got SIGTERM")

    config = SimpleNamespace(sweep=SimpleNamespace(parallel=None, search=None, on_error="continue"))
    point: Any = SimpleNamespace(ready=SimpleNamespace(checked=SimpleNamespace(config=config)))
    sweep = Sweep(point, [], [], Path("sweep"), [[]], [point], set())
    monkeypatch.setattr(sweep, "_job", job)
    monkeypatch.setattr(sweep, "_is_over", lambda number, point: False)
    with pytest.raises(RunPreempted, match="got SIGTERM between two jobs") as raised:
        sweep._run_jobs(None)
    assert raised.value.exit_code == AskedToLeave.exit_code == 75


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_what_trains_nothing_can_be_done_again(mode: str) -> None:
    config: Any = SimpleNamespace(mode=mode)
    assert can_go_on(config, SimpleNamespace(topology=SimpleNamespace(node_rank=1)))  # type: ignore[arg-type]
