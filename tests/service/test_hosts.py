"""Runs of several hosts: two runners on this machine, each with a name of its own, share one queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import trainer
from tests.service.test_runner import PATIENCE_S, begun, steps
from trainer.service import queue as queue_module
from trainer.service.queue import CANCEL, CANCELLED, DONE, FAILED, OVER, PREEMPTED, RUNNING, Queue, Run, Slots
from trainer.service.runner import Runner

ONE = Slots((0,), (), 1 << 40)


def until(queue: Queue, runners: list[Runner], number: int, states: tuple[str, ...], life: int = 0) -> Run:
    """Let the runners turn until a run is in one of these states."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for runner in runners:
            runner.turn()
        run = queue.run(number)
        if run is not None and run.state in states and run.life >= life:
            return run
        time.sleep(0.02)
    raise AssertionError(queue.run(number))


@pytest.fixture
def runners(queue: Queue) -> list[Runner]:
    found = [Runner(queue, ONE, host) for host in ("a", "b")]
    for runner in found:
        runner.turn()
    return found


def test_a_run_starts_on_both_hosts_or_on_none(queue: Queue, add: Callable[..., int], runners: list[Runner]) -> None:
    alone = until(queue, runners, add("work", 10), (RUNNING,))
    both = add("work", 3, hosts=2)
    waits = until(queue, runners, both, (queue_module.QUEUED,))
    for runner in runners:
        runner.turn()
    assert not waits.parts and queue.run(both).reason == "free: 1 of 2 hosts with 1 core"  # type: ignore[union-attr]
    run = until(queue, runners, both, OVER)
    assert run.state == DONE and queue.run(alone.number).state == DONE  # type: ignore[union-attr]
    lines = sorted(Path(run.folder, "hosts").read_text().splitlines())
    (first, second) = (line.split() for line in lines)
    assert first[:2] == ["0", "2"] and second[:2] == ["1", "2"] and first[2:] == second[2:], "one place to meet"
    assert Path(run.folder, "engine", "host.1.log").exists()


def test_hosts_meet_at_one_place_where_the_first_one_waits_for_git(
    queue: Queue, add: Callable[..., int], runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, answer = iter(range(5)), runners[0]._code_version
    monkeypatch.setattr(runners[0], "_code_version", lambda run: answer(run) if next(waits, None) is None else None)
    run = until(queue, runners, add("work", 3, hosts=2), OVER)
    first, second = (line.split() for line in sorted(Path(run.folder, "hosts").read_text().splitlines()))
    assert run.state == DONE and first[2:] == second[2:]


def test_where_one_host_fails_the_other_ends(queue: Queue, add: Callable[..., int], runners: list[Runner]) -> None:
    run = until(queue, runners, add("fail-second", 10**6, hosts=2), OVER)
    assert (run.state, run.code) == (FAILED, 3)
    assert until(queue, runners, add("work", 1, hosts=2), OVER).state == DONE, "no slot is left held"


def test_it_is_cancelled_and_makes_room_as_a_whole(
    queue: Queue, add: Callable[..., int], runners: list[Runner]
) -> None:
    run = until(queue, runners, add("work", 10**6, hosts=2), (RUNNING,))
    high = add("work", 2, priority=1)
    assert until(queue, runners, high, OVER).state == DONE
    run = until(queue, runners, run.number, (RUNNING,), life=2)
    assert run.preempted == 1
    queue.move(run.number, (RUNNING,), asked=CANCEL)
    assert until(queue, runners, run.number, OVER).state == CANCELLED


@pytest.mark.all
def test_two_pairs_of_hosts_do_not_wait_for_each_other(
    queue: Queue, add: Callable[..., int], runners: list[Runner]
) -> None:
    numbers = [add("work", 2, hosts=2) for _ in range(4)]
    assert [until(queue, runners[:: 1 if number % 2 else -1], number, OVER).state for number in numbers] == [DONE] * 4


def test_a_host_that_is_gone_gets_no_run(queue: Queue, add: Callable[..., int], runners: list[Runner]) -> None:
    queue._base.execute("UPDATE hosts SET beat = beat - 1000 WHERE name = 'b'")
    number = add("work", 1, hosts=2)
    runners[0].turn()
    assert queue.run(number).reason == "1 of 2 hosts with 1 core"  # type: ignore[union-attr]
    runners[1].beaten = float("-inf")
    assert until(queue, runners, number, OVER).state == DONE


def test_a_host_that_has_restarted_resumes_its_runs(queue: Queue, add: Callable[..., int]) -> None:
    """It counts for no death of the run's own, of which this one may have none."""
    runner = Runner(queue, ONE, "a")
    run = until(queue, [runner], add("work", 30, max_lost=0), (RUNNING,))
    begun(run)
    os.killpg(int((queue.folder / "runs" / f"{run.number}.a.begun").read_text().split()[0]), signal.SIGKILL)
    again = Runner(queue, ONE, "a")
    again.boot = "of another start"
    run = until(queue, [again], run.number, OVER)
    assert run.state == DONE and run.lost == 0 and int(steps(run)[1].split()[0]) > 0


@pytest.mark.parametrize(("flag", "state"), [((), PREEMPTED), (("--leave",), RUNNING)])
def test_a_runner_that_is_asked_to_end(
    flag: tuple[str, ...], state: str, queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets its runs save and wait, or go on; the next runner has them."""
    monkeypatch.setenv("TRAINER_HOME", str(queue.folder))
    number = add("work", 60)
    words = [sys.executable, "-m", "trainer", "runner", *flag]
    process = subprocess.Popen(words, cwd=Path(__file__).parents[2])
    end = time.monotonic() + PATIENCE_S
    while queue.run(number).state != RUNNING:  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.02)
    begun(queue.run(number))  # type: ignore[arg-type]
    process.terminate()
    assert process.wait(20) == 0
    run = queue.run(number)
    assert run is not None and run.state == state and not queue.hosts()
    assert until(queue, [Runner(queue, ONE)], number, OVER).state == DONE
    assert run.life + (state == PREEMPTED) == len(steps(run)), "none was started twice"


def test_a_disk_that_hosts_share_has_the_older_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def journal(folder: Path) -> str:
        return str(Queue(folder)._base.execute("PRAGMA journal_mode").fetchone()[0])

    assert journal(tmp_path / "here") == "wal" and queue_module.this_host(tmp_path) == "localhost"
    monkeypatch.setattr(queue_module, "is_shared", lambda folder: True)
    assert journal(tmp_path / "shared") == "delete" and queue_module.this_host(tmp_path) != "localhost"


@pytest.mark.long
def test_a_training_on_two_hosts_through_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    words = [sys.executable, "-m", "trainer", "runner", "--idle", "5", "--host"]
    runners = [subprocess.Popen([*words, host], cwd=Path(__file__).parents[2]) for host in ("a", "b")]
    queue = Queue(tmp_path / "home")
    end = time.monotonic() + PATIENCE_S
    while len(queue.hosts()) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    done = trainer(
        *("+recipe=digits_lenet", "epochs=1", "limit_train_batches=4", "tracking=none", "launch=queue"),
        *("launch.nnodes=2", "launch.cores=1", "hydra.run.dir=run", "launch.runner=false"),
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers" in done.stdout
    for runner in runners:
        assert runner.wait(60) == 0
