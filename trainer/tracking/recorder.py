"""The recorder: a separate process that carries runs' points from their folders to the trackers.

The main thread reads the parent's messages, and each tracker has a thread (:class:`Service`) with a queue of them, so
that a tracker that fails or is slow holds up no other one, and none holds up the training. The messages of one run:

    open -> (back | trained)* -> close

When the parent ends or is killed without ``close``, the runs that are still open are marked as KILLED.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.host import interpreter, json_text
from trainer.host.signals import leave_to_launcher
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.json_files import leave
from trainer.tracking import mlflow_settings
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import Follower, OpenRun, said
from trainer.tracking.resumed import goes_on
from trainer.tracking.trackers import LOGS, made

EVERY_S = 1.0
LAST_WORDS_S = 5.0
ENDING_S = 3.0
"""Longest wait for the processes of a killed launcher to end."""


def messages(way: socket.socket, gone: Sequence[int] = ()) -> Iterator[tuple[dict[str, Any], FolderLock | None]]:
    """Yield the parent's messages, each with the lock on its run's folder that came along, until they end.

    Args:
        way: the Unix socket on which they come. gone: a file descriptor that can be read when the parent is dead: the
            way may be open in a process that the parent has forked.
    """
    buffered, locks = b"", deque[int]()
    while way in connection.wait([way, *gone]):
        data, more, _, _ = socket.recv_fds(way, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        locks.extend(more)
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            message = json_text.loads(line)
            yield message, FolderLock.received(locks.popleft()) if message.pop("held", False) else None


class Service(threading.Thread):
    """The thread of one tracker, which serves all runs of this command, one after the other.

    Args:
        name: the tracker's, as in ``tracking.trackers``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.messages: queue.SimpleQueue[tuple[dict[str, Any], OpenRun] | None] = queue.SimpleQueue()
        self.followers: dict[str, Follower] = {}

    def run(self) -> None:
        """Obey messages until None comes; in between, once in ``EVERY_S``, send what is new.

        A cut of metrics.jsonl is so obeyed before the file is read again.
        """
        next_round = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                if (item := self.messages.get(timeout=max(0.0, next_round - time.monotonic()))) is None:
                    return
                self.obey(*item)
            if self.messages.empty() and time.monotonic() >= next_round:
                for follower in self.followers.values():
                    follower.try_once()
                next_round = time.monotonic() + EVERY_S

    def obey(self, message: dict[str, Any], opened: OpenRun) -> None:
        """Do what a message says; what a tracker raises in it is shown to the user."""
        folder = str(opened.folder)
        try:
            match message, self.followers.get(folder):
                case {"do": "open"}, _:
                    tracker = made(self.name, opened.run.trackers[self.name], opened.folder)
                    parent = self.followers.get(opened.run.parent or "")
                    away = message.get("away", {}).get(self.name, "")
                    self.followers[folder] = Follower(self.name, tracker, opened, parent, away)
                case {"do": "back", "points": points}, Follower() as follower:
                    follower.go_back(points)
                case {"do": "trained"}, Follower() as follower:
                    follower.tracker.trained()
                case {"do": "close", "status": status, "tags": tags, "timeout_s": timeout_s}, Follower() as follower:
                    del self.followers[folder]
                    tell(follower.finish(status, tags, timeout_s))
        except Exception as error:
            tell_user(f"{self.name}: {said(error)}")
        if message["do"] == "close":
            opened.done(self.name)


class Recorder:
    """Hands the parent's messages to the trackers' threads."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.runs: dict[str, OpenRun] = {}

    def obey(self, message: dict[str, Any], hold: FolderLock | None = None) -> None:
        """Hand a message of the parent to each tracker of its run."""
        folder = message["folder"]
        if message["do"] == "open":
            redact.HERE.learn(message["secrets"])
            run, positions = goes_on(TrackedRun.of(message["run"]), tell_user)
            self.runs[folder] = OpenRun(run, positions, tell_user, hold)
        opened = self.runs[folder]
        for name in opened.run.trackers:
            if name not in self.services:
                self.services[name] = Service(name)
                self.services[name].start()
            self.services[name].messages.put((message, opened))
        if message["do"] == "close":
            del self.runs[folder]

    def follow(self, parent: int, way: socket.socket) -> None:
        """Serve the parent's messages until they end; then close the runs that are still open as KILLED."""
        gone = list[int]()
        with contextlib.suppress(AttributeError, OSError):
            gone.append(os.pidfd_open(parent))
        for message, hold in messages(way, gone):
            self.obey(message, hold)
        self.end()

    def end(self) -> None:
        """Mark the runs that are still open as KILLED, and end all threads; a tracker that hangs is left behind."""
        killed = {"status": "KILLED", "tags": {"trainer.ended": "the launcher was killed"}, "timeout_s": LAST_WORDS_S}
        runs = list(self.runs.items())
        for folder, opened in runs:
            if mark_killed(opened):
                self.obey({"do": "close", "folder": folder, **killed})
        until = time.monotonic() + LAST_WORDS_S * (1 + len(runs))
        for service in self.services.values():
            service.messages.put(None)
        for service in self.services.values():
            service.join(max(0.1, until - time.monotonic()))


def mark_killed(opened: OpenRun) -> bool:
    """Write into the folder of a run with a dead launcher that it was killed; False: the run's next life has begun."""
    if opened.hold is not None and not opened.hold.outlast(ENDING_S):
        return False
    with contextlib.suppress(OSError, ValueError):
        status = json_text.read_object(opened.folder / "status.json")
        leave(opened.folder / "status.json", {**status, "state": "killed"})
    redact.scrub(opened.folder, LOGS, redact.HERE.values)
    return True


_answering = threading.Lock()


def tell(message: dict[str, Any]) -> None:
    """Send an answer from the recorder process to its parent, which may be gone."""
    shown = {
        key: redact.text(value) if isinstance(value, str) and key != "closed" else value
        for key, value in message.items()
    }
    assert sys.__stdout__ is not None
    with _answering, contextlib.suppress(OSError):
        sys.__stdout__.write(json.dumps(shown) + "\n")
        sys.__stdout__.flush()


def tell_user(line: str) -> None:
    """Have the parent show a line."""
    tell({"says": line})


def main(argv: list[str]) -> int:
    """The recorder's command line: ``resend RUN_FOLDER`` from a user, or a process id from the launcher to follow."""
    if argv and argv[0].isdigit():
        leave_to_launcher()
        # Trackers print migrations and addresses; errors go to the parent as answers, on the true stdout.
        sys.stdout = sys.stderr = open(os.devnull, "w", errors="replace")  # noqa: SIM115
        interpreter.begin()
        for node in json_text.loads(argv[1]):  # while the parent imports torch
            with contextlib.suppress(Exception):
                made("", node, Path()).prepare()
        gc.freeze()
        gc.enable()
        Recorder().follow(int(argv[0]), socket.socket(fileno=0))
        interpreter.leave(0)
    from trainer.tracking import resend

    return resend.main(argv)


if __name__ == "__main__":
    mlflow_settings.settle()
    sys.exit(main(sys.argv[1:]))
