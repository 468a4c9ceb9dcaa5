"""The runner with real processes: every run ends once, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainer.errors import RunFailed
from trainer.service.queue import (
    CANCEL,
    CANCELLED,
    DONE,
    FAILED,
    HERE,
    LEAVE,
    OVER,
    QUEUED,
    RUNNING,
    STARTING,
    Queue,
    Run,
    Slots,
)
from trainer.service.runner import Runner

TWO = Slots((0, 0 if (os.cpu_count() or 1) < 2 else 1), ("GPU-a", "GPU-b"), 1 << 40)
PATIENCE_S = 60.0


def until(queue: Queue, runner: Runner, number: int, states: tuple[str, ...]) -> Run:
    """Turn until a run is in one of these states."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        runner.turn()
        run = queue.run(number)
        assert run is not None
        if run.state in states:
            return run
        time.sleep(0.02)
    raise AssertionError(queue.run(number))


def until_next_life(queue: Queue, runner: Runner, run: Run) -> Run:
    """Turn until a run has been started again."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        now = until(queue, runner, run.number, (RUNNING, *OVER))
        if now.life > run.life:
            return now
    raise AssertionError(queue.run(run.number))


def steps(run: Run) -> list[str]:
    return Path(run.folder, "lives").read_text().splitlines()


def begun(run: Run) -> None:
    """Wait until a run counts."""
    end = time.monotonic() + PATIENCE_S
    while not Path(run.folder, "saved").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_runs_get_their_slots_their_log_and_their_exit_code(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, TWO)
    done, failed = add("work", 2, gpus=1), add("fail", 3)
    first, second = until(queue, runner, done, OVER), until(queue, runner, failed, OVER)
    assert (first.state, first.code, second.state, second.code) == (DONE, 0, FAILED, 3)
    assert second.reason == "exit code 3" and Path(second.folder, "engine", "code").read_text() == "3\n"
    assert steps(first)[0].startswith("0 GPU-a [0]") and steps(second)[0].startswith("0  [")


@pytest.mark.all
def test_a_run_that_takes_more_memory_than_was_set_aside_saves_and_ends(queue: Queue, add: Callable[..., int]) -> None:
    runner, modest = Runner(queue, TWO), add("work", 5, memory=64 << 20)
    large, deaf = add("large", 10_000, memory=48 << 20), add("deaf", 10_000, memory=48 << 20, grace_s=-14.0)
    until(queue, runner, modest, (DONE,))
    run = until(queue, runner, large, OVER)
    assert (run.state, run.code) == (FAILED, 75) and "and launch.memory sets 48 MiB aside" in run.reason
    assert "saved" in Path(run.log).read_text()
    run = until(queue, runner, deaf, OVER)
    assert (run.state, run.code) == (FAILED, 137) and "sets 48 MiB aside" in run.reason


def test_a_git_that_hangs_holds_up_its_own_run_alone(
    queue: Queue, add: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin, released = tmp_path / "bin", tmp_path / "released"
    bin.mkdir()
    (bin / "git").write_text(f'#!/bin/sh\nwhile [ "$2" = {tmp_path} ] && [ ! -e {released} ]; do sleep 0.05; done\n')
    (bin / "git").chmod(0o755)
    monkeypatch.setattr("trainer.host.code_version.ASK_S", PATIENCE_S)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    (tmp_path / "other").mkdir()
    runner, slow, quick = Runner(queue, TWO), add("work", 5), add("work", 5, started_in=str(tmp_path / "other"))
    until(queue, runner, quick, (DONE,))
    assert (run := queue.run(slow)) is not None and run.state == STARTING and HERE in queue.hosts()
    released.touch()
    until(queue, runner, slow, (DONE,))


@pytest.mark.all
def test_a_turn_without_a_change_does_not_read_the_runs_that_wait(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, Slots((0,), (), 1 << 40))
    until(queue, runner, first := add("work", 100_000), (RUNNING,))
    steps: list[int] = []
    queue._base.set_progress_handler(lambda: steps.append(1), 1)  # called at each instruction of SQLite
    at_length = {}
    for length in (10, 300):
        while len(queue.in_states((QUEUED,))) < length:
            last = add("work", 1)
        for _ in range(3):
            runner.turn()
        runner.beaten = time.monotonic()  # no sign of life in the turn that counts
        steps.clear()
        assert runner.turn()
        at_length[length] = len(steps)
    assert 0 < at_length[300] <= 1.1 * at_length[10]  # of the same row, a few more where its index has grown
    others = Queue(queue.folder)
    others.move(last, (QUEUED,), asked=CANCEL)
    until(queue, runner, last, (CANCELLED,))
    others.move(first, (RUNNING,), asked=CANCEL)
    others.close()
    until(queue, runner, first, (CANCELLED,))


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_runner_ends_when_its_queue_is_no_longer_there(queue: Queue, how: str) -> None:
    file = queue.folder / "queue.sqlite"
    file.unlink()
    if how == "replaced":
        file.with_suffix(".other").touch()
        file.with_suffix(".other").rename(file)
    with pytest.raises(RunFailed, match="the file of the queue was removed"):
        Runner(queue, TWO).run()


def test_a_run_makes_room_and_goes_on_where_it_was(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, Slots((0,), (), 1 << 40))
    low = add("work", 40)
    begun(until(queue, runner, low, (RUNNING,)))
    high = add("work", 2, priority=1)
    assert until(queue, runner, high, OVER).state == DONE
    run = until(queue, runner, low, OVER)
    assert run.state == DONE and run.life == 2 and run.preempted == 1 and int(steps(run)[1].split()[0]) > 0
    assert "saved" in Path(run.log).read_text()


def test_what_is_cancelled_ends_whether_it_waits_saves_or_is_deaf(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, Slots((0,), (), 1 << 40))
    runs = until(queue, runner, add("work", 1000), (RUNNING,)).number, add("work", 1000)
    begun(queue.run(runs[0]))  # type: ignore[arg-type]
    for number in runs:
        queue.move(number, (QUEUED, RUNNING), asked=CANCEL)
    ended = [until(queue, runner, number, OVER) for number in runs]
    assert [run.state for run in ended] == [CANCELLED, CANCELLED] and ended[1].reason == "while it waited"
    deaf = until(queue, runner, add("deaf", 10**6, grace_s=-14.0), (RUNNING,))
    begun(deaf)
    queue.move(deaf.number, (RUNNING,), asked=CANCEL)
    assert until(queue, runner, deaf.number, OVER).state == CANCELLED


def test_a_run_that_is_asked_to_leave_ends_with_75(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, TWO)
    run = until(queue, runner, add("work", 1000), (RUNNING,))
    begun(run)
    queue.move(run.number, (RUNNING,), asked=LEAVE)
    assert until(queue, runner, run.number, OVER).code == 75


def test_so_often_it_may_be_gone_or_pre_empted(queue: Queue, add: Callable[..., int]) -> None:
    runner = Runner(queue, TWO)
    run = until(queue, runner, add("work", 10**6, max_lost=1), (RUNNING,))
    begun(run)
    Path(run.folder, "saved").unlink()
    kill_run(queue, run.number)
    begun(until_next_life(queue, runner, run))
    kill_run(queue, run.number)
    run = until(queue, runner, run.number, OVER)
    assert run.state == FAILED and "gone 2 times" in run.reason


def kill_run(queue: Queue, number: int) -> None:
    """Kill all processes of a run, as the kernel does where memory ends."""
    try:
        group = (queue.folder / "runs" / f"{number}.{HERE}.begun").read_text().split()[0]
        os.killpg(int(group), signal.SIGKILL)
    except (OSError, ValueError, IndexError):
        return


@pytest.mark.all
@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.long)])
def test_whatever_is_killed_each_run_ends_once_and_none_runs_twice(
    kills: int, queue: Queue, add: Callable[..., int], tmp_path: Path
) -> None:
    """Runners and runs are killed at random; a new runner follows at once."""
    draw = random.Random(kills)
    numbers = [add("work", draw.randint(5, 40), priority=draw.randint(0, 2)) for _ in range(max(6, kills // 2))]
    script = (
        "import sys, pathlib\n"
        "from trainer.service.queue import Queue, Slots\n"
        "from trainer.service.runner import Runner\n"
        "Runner(Queue(pathlib.Path(sys.argv[1])), Slots((0, 1), (), 1 << 40)).run()\n"
    )

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", script, str(queue.folder)])

    runner = start()
    end = time.monotonic() + 10 * PATIENCE_S
    while (left := [n for n in numbers if queue.run(n).state not in OVER]) and time.monotonic() < end:  # type: ignore[union-attr]
        time.sleep(draw.uniform(0.05, 1.0))
        if kills > 0:
            kills -= 1
            if draw.random() < 0.5:
                runner.kill()
                runner.wait()
                runner = start()
            else:
                kill_run(queue, draw.choice(left))
    runner.terminate()
    assert runner.wait(20) in (0, -signal.SIGTERM) and not left  # it may not have begun
    for number in numbers:
        run = queue.run(number)
        assert run is not None and run.state == DONE, run
        assert not Path(run.folder, "twice").exists()
        assert len(Path(run.folder, "done").read_text().splitlines()) == 1
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
