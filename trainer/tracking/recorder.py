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
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.errors import UserError
from trainer.host import interpreter, json_text
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.json_files import leave
from trainer.tracking import mlflow_settings
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import Follower, Notes, said
from trainer.tracking.messages import subject
from trainer.tracking.resumed import goes_on
from trainer.tracking.trackers import LOGS, made

EVERY_S = 1.0
LAST_WORDS_S = 5.0
ENDING_S = 3.0
"""Longest wait for the processes of a killed launcher to end."""


class Inbox:
    """The parent's messages, each with the lock on its run's folder that came along.

    Args:
        way: the Unix socket on which they come.
    """

    def __init__(self, way: socket.socket) -> None:
        self.way, self.buffered = way, b""
        self.locks: deque[int] = deque()
        self.ended = False

    def read(self) -> Iterator[tuple[dict[str, Any], FolderLock | None]]:
        """Yield the messages that are there, after the first of them has come."""
        data, locks, _, _ = socket.recv_fds(self.way, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
        self.locks.extend(locks)
        self.ended = not data
        *lines, self.buffered = (self.buffered + data).split(b"\n")
        for line in lines:
            message = json_text.loads(line)
            yield message, FolderLock.received(self.locks.popleft()) if message.pop("held", False) else None


class OpenRun:
    """A run that is open: its description, ``tracking.json``, the lock on its folder, and the trackers not yet done."""

    def __init__(self, message: Mapping[str, Any], hold: FolderLock | None) -> None:
        self.secrets: Sequence[str] = message["secrets"]
        redact.HERE.learn(self.secrets)
        self.run, positions = goes_on(TrackedRun.of(message["run"]), tell_user)
        self.notes = Notes(self.run, positions, tell_user)
        for back in message.get("backs", ()):
            self.go_back(back, self.notes.tracked.trackers)
        self.notes.write()
        self.away: Mapping[str, str] = message.get("away", {})
        self.hold = hold
        self.left, self.lock = set(self.run.trackers), threading.Lock()

    def go_back(self, message: Mapping[str, Any], names: Iterable[str]) -> None:
        """Move the positions of trackers that are not served, where metrics.jsonl was cut."""
        size = message["points"]
        for name in list(names):
            position = self.notes.tracked.trackers[name]
            self.notes.tracked.trackers[name] = position.after_cut(bytes(size) + message["cut"].encode(), size)

    def done(self, name: str) -> None:
        """Note that a tracker has ended this run; the last one releases the folder."""
        with self.lock:
            self.left.discard(name)
            if not self.left and self.hold is not None:
                self.hold.leave()
                self.hold = None

    def mark_killed(self) -> bool:
        """Write into the folder of a run whose launcher is gone that it was killed; False: its next life has begun."""
        if self.hold is not None and not self.hold.outlast(ENDING_S):
            return False
        status_file = Path(self.run.folder) / "status.json"
        try:
            status = json_text.read_object(status_file)
            leave(status_file, {**status, "state": "killed"})
        except (OSError, ValueError):
            pass
        redact.scrub(Path(self.run.folder), LOGS, self.secrets)
        return True


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
        folder = opened.run.folder
        try:
            if "open" in message:
                self.followers[folder] = self._follower(opened)
            elif (follower := self.followers.get(folder)) is None:  # which could not be made
                pass
            elif "back" in message:
                follower.go_back(message["points"], message["cut"])
            elif "trained" in message:
                follower.tracker.trained()
            elif "close" in message:
                tell(self.followers.pop(folder).finish(message["status"], message["tags"], message["timeout_s"]))
        except Exception as error:
            tell_user(f"{self.name}: {said(error)}")
        if "close" in message:
            opened.done(self.name)

    def _follower(self, opened: OpenRun) -> Follower:
        run = opened.run
        tracker = made(self.name, run.trackers[self.name], Path(run.folder))
        parent = self.followers.get(run.parent or "")
        follower = Follower(self.name, tracker, run, opened.notes, parent, opened.away.get(self.name, ""))
        tracker.say = follower.say
        return follower


class Recorder:
    """Hands the parent's messages to the trackers' threads."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.runs: dict[str, OpenRun] = {}

    def obey(self, message: dict[str, Any], hold: FolderLock | None = None) -> None:
        """Hand a message of the parent to each tracker of its run."""
        folder = subject(message)
        if "open" in message:
            self.runs[folder] = OpenRun(message, hold)
        opened = self.runs[folder]
        if "back" in message:  # of trackers of earlier lives
            opened.go_back(message, opened.notes.tracked.trackers.keys() - opened.run.trackers.keys())
        self._tell(opened, message)
        if "close" in message:
            del self.runs[folder]

    def _tell(self, opened: OpenRun, message: dict[str, Any]) -> None:
        for name in opened.run.trackers:
            if name not in self.services:
                self.services[name] = Service(name)
                self.services[name].start()
            self.services[name].messages.put((message, opened))

    def follow(self, parent: int, way: socket.socket) -> None:
        """Serve the parent's messages until they end; then close the runs that are still open as KILLED."""
        gone, inbox = _watch(parent), Inbox(way)
        while not inbox.ended:
            ready = connection.wait([way, *gone])
            if way in ready:
                for message, hold in inbox.read():
                    self.obey(message, hold)
            else:  # all that it had sent is read; the way may be open in a process that it has forked
                break
        self.end()

    def end(self) -> None:
        """Mark the runs that are still open as KILLED, and end all threads; a tracker that hangs is left behind."""
        killed = {"status": "KILLED", "tags": {"trainer.ended": "the launcher was killed"}, "timeout_s": LAST_WORDS_S}
        for folder, opened in self.runs.items():
            if opened.mark_killed():
                self._tell(opened, {"close": folder, **killed})
        until = time.monotonic() + LAST_WORDS_S * (1 + len(self.runs))
        for service in self.services.values():
            service.messages.put(None)
        for service in self.services.values():
            service.join(max(0.1, until - time.monotonic()))


def _watch(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except (ProcessLookupError, AttributeError, OSError):
        return []


_answering = threading.Lock()


def tell(message: dict[str, Any]) -> None:
    """Send an answer from the recorder process to its parent, which may be gone."""
    plain = {key: redact.text(value) if isinstance(value, str) else value for key, value in message.items()}
    assert sys.__stdout__ is not None
    with _answering, contextlib.suppress(OSError):
        sys.__stdout__.write(json.dumps({**plain, **{key: message[key] for key in message if key == "closed"}}) + "\n")
        sys.__stdout__.flush()


def tell_user(line: str) -> None:
    """Have the parent show a line."""
    tell({"says": line})


def main(argv: list[str]) -> int:
    """The recorder's command line: ``resend RUN_FOLDER`` from a user, or a process id from the launcher to follow."""
    if argv and argv[0].isdigit():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    from trainer.tracking.resend import USAGE, resend

    try:
        if len(argv) != 2 or argv[0] != "resend":
            what = " ".join(["python -m trainer.tracking.recorder", *argv])
            raise UserError(what, "sends what a finished run could not send to its trackers", USAGE)
        return resend(Path(argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    mlflow_settings.settle()
    sys.exit(main(sys.argv[1:]))
