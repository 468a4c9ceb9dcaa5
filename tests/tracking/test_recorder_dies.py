"""The tracking process dies while a run goes on: another one sends what is missing, and no point twice."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.faults.test_restarts import sent
from tests.pace import wait_for
from tests.runs import losses, mlflow_runs, read, start
from tests.tracking.test_resumed_points import Store, again, counts, described, following, write
from trainer.run_folder import folder_lock
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.reset_files import reset_to_checkpoint
from trainer.run_folder.tracking_file import position
from trainer.tracking import client, mlflow_settings, recorder
from trainer.tracking.contract import TrackedRun, Tracker
from trainer.tracking.follower import Follower, OpenRun
from trainer.tracking.mlflow_tracker import MlflowTracker
from trainer.tracking.resumed import goes_on

SCHEDULES, TURNS = 100, 12
NODES = {"mlflow": {"_target_": "trainer.tracking.mlflow_tracker.MlflowTracker"}}
FAILING = [
    ["log_batch before"],
    ["log_batch half"],
    ["log_batch after"],
    ["history"],
    ["log_batch half", "history"],
    ["get_run"],
]


class Played:
    """A run whose points are written, cut off and written again, while its recorder comes and goes."""

    def __init__(self, folder: Path, seed: int, can_be_asked: bool) -> None:
        self.can_be_asked = can_be_asked
        self.folder, self.store, self.chance = folder, Store(), random.Random(seed)
        self.messages: list[dict[str, Any]] = [message(folder)]
        self.ends = [(0, 0)]
        self.highest = self.time = 0
        self.follower: Follower | None = None
        self.born(self.messages[0])

    def born(self, *messages: Mapping[str, Any]) -> None:
        for one in messages:
            if one["do"] == "open":
                run, positions = goes_on(TrackedRun.of(one["run"]), print)
                self.follower = following(
                    run, positions, self.store, MlflowTracker if self.can_be_asked else CannotBeAsked
                )
            elif self.follower is not None:
                self.follower.go_back(one["points"])

    def dies(self) -> None:
        if self.follower is not None and self.follower.ledger is not None:
            self.follower.ledger.file.file.close()  # as the system does, without what still waits
        self.follower = None

    def writes(self) -> None:
        self.time += 1000
        _, first = self.ends[-1]
        last = first + self.chance.randint(1, 9)
        self.ends.append((write(self.folder, first, last, self.time), last))
        self.highest = max(self.highest, last)

    def goes_back(self, alive: bool) -> None:
        kept = self.chance.randrange(len(self.ends))
        del self.ends[kept + 1 :]
        reset_to_checkpoint(self.folder, self.ends[-1][0], lambda _: None)
        self.messages.append({"do": "back", "folder": str(self.folder), "points": self.ends[-1][0]})
        if alive:
            self.born(self.messages[-1])

    def tries(self) -> None:
        assert self.follower is not None
        again(self.follower)

    def turn(self) -> None:
        match self.chance.randrange(6):
            case 0 | 1:
                self.writes()
            case 2:
                self.tries()
            case 3:
                self.store.failing = list(self.chance.choice(FAILING if self.can_be_asked else [["log_batch before"]]))
                self.tries()
                self.store.failing = []
            case 4:
                self.goes_back(alive=True)
            case 5:
                self.dies()
                for _ in range(self.chance.randrange(3)):  # before the launcher has noticed
                    if self.chance.random() < 0.5:
                        self.writes()
                    else:
                        self.goes_back(alive=False)
                self.born(*map(client.repeated, self.messages))


class CannotBeAsked(MlflowTracker):
    """A service that answers whether it has got points, and not which points it has."""

    sent = Tracker.sent


class Serving:
    """A recorder whose MLflow server is a store of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.recorder = Store(), recorder.Recorder()
        monkeypatch.setattr(mlflow_settings, "client", lambda uri: self.store)


def message(run_dir: Path) -> dict[str, Any]:
    """The message that opens a run."""
    return {"do": "open", "folder": str(run_dir), "run": asdict(described(run_dir)), "secrets": []}


def recorder_of(launcher: int) -> psutil.Process | None:
    """The process that sends a run's points, as long as there is one."""
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(launcher).children():
            with suppress(ProcessLookupError):
                if os.getsid(one.pid) == one.pid:
                    return one
    return None


@pytest.mark.parametrize("can_be_asked", [True, False])
@pytest.mark.parametrize("seeds", [range(SCHEDULES), pytest.param(range(SCHEDULES, 3000), marks=pytest.mark.long)])
def test_each_point_is_there_once_after_any_schedule(seeds: range, can_be_asked: bool, tmp_path: Path) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        played = Played(folder, seed, can_be_asked)
        for _ in range(TURNS):
            played.turn()
        while played.ends[-1][1] < played.highest:
            played.writes()
        for _ in range(3):
            played.tries()
        assert played.follower is not None and not played.follower.position.error, seed
        there = Counter[Any]()
        for run_id in played.store.runs:
            found, wanted = counts(played.store, run_id, folder)
            there += found
        assert there == (wanted if played.store.runs else Counter()), seed
        played.dies()


@pytest.mark.all
def test_a_run_of_which_the_recorder_is_killed_twice_is_whole_in_mlflow(tmp_path: Path) -> None:
    """Once after points were sent; the second one at once, before it has read what it is told."""
    process = start(
        "+recipe=digits_lenet",
        "hydra.run.dir=run",
        "epochs=6",
        "execution.log_every=1",
        "execution.threads=1",
        "tracking.log_model=false",
        "callbacks=[{_target_:tests.faults.gate.Gate,at:200,until:go}]",
        cwd=tmp_path,
        spares=3,
    )
    wait_for(lambda: position(tmp_path / "run").sent_bytes > 0, 60, "points are sent")
    first = recorder_of(process.pid)
    assert first is not None
    first.kill()
    wait_for(
        lambda: (second := recorder_of(process.pid)) is not None and second.pid != first.pid, 60, "another recorder"
    )
    second = recorder_of(process.pid)
    assert second is not None
    second.kill()
    (tmp_path / "run" / "go").touch()
    screen = tmp_path / "screen.txt"
    assert process.wait(300) == 0, screen.read_text()
    assert screen.read_text().count("the tracking process was killed by SIGKILL; another one goes on") == 2
    assert sent(tmp_path) == losses(tmp_path / "run")
    [run] = mlflow_runs(tmp_path)
    assert run.info.status == "FINISHED" and run.data.tags["trainer.resumed"] == "0"


def test_a_recorder_that_always_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said: list[str] = []
    tracker = client.RecorderProcess(said.append, NODES)
    tracker.open(tmp_path, described(tmp_path), [])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    ended = tracker.close(tmp_path, "FINISHED", {}, 30.0)
    tracker.end()
    assert ended == {"mlflow": client.Ended(error="the tracking process died")}
    assert len(said) == client.MOST_STARTS and "ended with exit code 1, the 6th of this command" in said[-1]


def test_a_recorder_that_dies_before_its_launcher_knows_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, listen, noticed = client.RecorderProcess._start, client.RecorderProcess._start_again, Event()

    def slow(self: client.RecorderProcess) -> Any:
        started = start(self)
        if self.starts == 1:
            assert not noticed.wait(0.2), "it is replaced before it is there"
        return started

    def notices(self: client.RecorderProcess, dead: Any) -> None:
        listen(self, dead)
        noticed.set()

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(client.RecorderProcess, "_start", slow)
    monkeypatch.setattr(client.RecorderProcess, "_start_again", notices)
    tracker = client.RecorderProcess(list[str]().append, NODES)
    assert noticed.wait(30) and tracker.starts > 1
    tracker.end()


def killed(folder: Path, monkeypatch: pytest.MonkeyPatch, *opened: Path, forked: bool = False) -> socket.socket:
    """What a recorder still has to read of a launcher that had the folder, opened these runs, and got SIGKILL.

    Args:
        forked: a process that it has forked still has its end of the way.
    """
    way, its = socket.socketpair()
    monkeypatch.setattr(client.RecorderProcess, "_start", lambda self: (SimpleNamespace(), way))
    launcher, tracker = FolderLock(folder), client.RecorderProcess(print, NODES)
    assert launcher.share()
    for run_dir in opened:
        tracker.open(run_dir, described(run_dir), [])
    if not forked:
        way.close()
    launcher.leave()
    return its


def test_a_killed_launcher_leaves_the_folder_to_its_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the recorder, which imports MLflow, has read nothing yet."""
    way, serving = killed(tmp_path, monkeypatch, tmp_path), Serving(monkeypatch)
    (tmp_path / "status.json").write_text('{"state": "running"}')
    next_life = FolderLock(tmp_path)
    assert not next_life.take(), "the recorder is about to write in it how the run ended"
    for one, hold in recorder.messages(way):
        serving.recorder.obey(one, hold)
    assert not next_life.take()
    serving.recorder.end()
    assert read(tmp_path / "status.json")["state"] == "killed"
    assert serving.store.runs["run0"].info.status == "KILLED"
    assert next_life.take()
    way.close()


@pytest.mark.parametrize("forked", [True, False])
def test_what_a_launcher_has_sent_before_it_was_killed_is_read(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder, which was busy, finds both at once: that the launcher is dead, and what it had sent."""
    way, serving = killed(tmp_path, monkeypatch, tmp_path, forked=forked), Serving(monkeypatch)
    (tmp_path / "status.json").write_text('{"state": "running"}')
    if not (launcher := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOWAIT)
    serving.recorder.follow(launcher, way)
    os.waitpid(launcher, 0)
    assert read(tmp_path / "status.json")["state"] == "killed"
    assert serving.store.runs["run0"].info.status == "KILLED"
    way.close()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is stopped"])
def test_a_worker_that_outlives_its_killed_launcher_has_not_the_last_word(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "ENDING_S", 60.0 if ends else 0.2)
    monkeypatch.setattr(folder_lock, "POLL_S", 0.01)
    launcher, worker = FolderLock(tmp_path), FolderLock(tmp_path)
    assert launcher.share() and worker.share()
    opened = OpenRun(described(tmp_path), {}, print, hold=launcher)

    def last_words() -> None:
        time.sleep(0.3)
        (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')
        worker.leave()

    (tmp_path / "status.json").write_text('{"state": "running", "step": 6}')
    writes = threading.Thread(target=last_words if ends else lambda: None)
    writes.start()
    assert recorder.mark_killed(opened)
    writes.join()
    assert read(tmp_path / "status.json") == {"state": "killed", "step": 7 if ends else 6}


def test_a_recorder_writes_nothing_where_the_next_life_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, worker, next_life = FolderLock(tmp_path), FolderLock(tmp_path), FolderLock(tmp_path)
    assert launcher.share() and worker.share()
    opened = OpenRun(described(tmp_path), {}, print, hold=launcher)
    take = FolderLock.take

    def taken_between(self: FolderLock) -> bool:
        """The worker ends when the recorder has just seen it."""
        found = take(self)
        if self is launcher:
            worker.leave()
            assert next_life.take()
        return found

    (tmp_path / "status.json").write_text('{"state": "running"}')
    monkeypatch.setattr(FolderLock, "take", taken_between)
    assert not recorder.mark_killed(opened) and read(tmp_path / "status.json") == {"state": "running"}


def test_a_recorder_that_dies_with_its_launcher_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = killed(tmp_path, monkeypatch, tmp_path)
    assert not FolderLock(tmp_path).take()
    way.close()
    assert FolderLock(tmp_path).take()


def test_each_run_of_a_recorder_has_the_lock_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder that is not there yet, as of a sweep, there is none; messages come in pieces."""
    folders = [tmp_path / "sweep", *(tmp_path / str(number) for number in range(5))]
    for folder in folders[1:]:
        folder.mkdir()
    way = killed(tmp_path, monkeypatch, *folders)
    held = {one["folder"]: hold for one, hold in recorder.messages(way)}
    assert list(held) == list(map(str, folders)) and held[str(folders[0])] is None
    for folder in folders[1:]:
        hold = held[str(folder)]
        assert hold is not None and os.fstat(hold.descriptor).st_ino == (folder / ".lock").stat().st_ino
        assert not FolderLock(folder).take()
        hold.leave()
        assert FolderLock(folder).take()
    way.close()


def test_no_run_of_a_sweep_waits_for_a_recorder_that_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, its = socket.socketpair()
    monkeypatch.setattr(
        client.RecorderProcess, "_start", lambda self: (SimpleNamespace(wait=lambda: 1, poll=lambda: 1), way)
    )
    said = list[str]()
    tracker = client.RecorderProcess(said.append, NODES)
    tracker.starts = client.MOST_STARTS
    tracker._start_again(tracker.process)
    for number in range(3):
        ended = tracker.close(tmp_path / str(number), "FINISHED", {}, 0.1)
        assert ended["mlflow"].error == "the tracking process died"
    assert len(said) == 1
    way.close()
    its.close()


def test_a_recorder_that_has_ended_leaves_no_file_open() -> None:
    """A notebook has one for each run."""
    tracker = client.RecorderProcess(print, NODES)
    tracker.end()
    assert tracker.way.fileno() == -1
    wait_for(lambda: tracker.process.stdout is not None and tracker.process.stdout.closed, 10, "its answers are open")
