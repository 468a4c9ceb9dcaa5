"""The recorder: a separate process that sends runs' files to MLflow, in batches, and again if they are lost."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.config.secret_parts import HIDDEN
from trainer.errors import UserError, why
from trainer.host import interpreter, json_text
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock, refusal
from trainer.run_folder.json_files import leave
from trainer.run_folder.tracking_file import Remembered
from trainer.tracking import mlflow_settings, reopened_run
from trainer.tracking.mlflow_run import LOGS, Follower
from trainer.tracking.recorder_answers import tell
from trainer.wording import quoted

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


def _follow(parent: int, way: socket.socket) -> None:
    """Serve the parent's messages until they end; then close the runs that are still open as KILLED."""
    followers: dict[str, Follower] = {}
    gone, inbox = _watch(parent), Inbox(way)
    next_round = 0.0
    while not inbox.ended:
        ready = connection.wait([way, *gone], max(0.0, next_round - time.monotonic()))
        dead = any(one in ready for one in gone)
        if way in ready:
            for message, hold in inbox.read():
                _obey(message, followers, hold)
        elif dead:  # all that it had sent is read; the way may be open in a process that it has forked
            break
        if time.monotonic() >= next_round and not dead:
            for follower in followers.values():
                follower.try_once()
            if followers and not gc.isenabled():
                _get_ready(any(follower.run.get("models") for follower in followers.values()))
            next_round = time.monotonic() + EVERY_S
    for follower in followers.values():
        _mark_killed(follower)


def _get_ready(packs: bool) -> None:
    """Import while the training runs what its end will need; from then on garbage is collected."""
    if packs:
        with contextlib.suppress(Exception):  # then it is missed where it is needed, which is told
            from trainer.tracking import logged_model, served_model  # noqa: F401
    gc.freeze()
    gc.enable()


def _obey(message: dict[str, Any], followers: dict[str, Follower], hold: FolderLock | None = None) -> None:
    if "open" in message:
        parent = followers.get(message.get("parent") or "")
        if parent is not None and parent.run_id is None:
            parent.try_once()
        secrets, away, backs = message.pop("secrets"), message.pop("away", ""), message.pop("backs", ())
        redact.HERE.learn(secrets)
        follower = following(message, parent.run_id if parent else None, secrets)
        follower.hold = hold
        if away:  # which has been said
            follower.away_since, follower.error = time.monotonic(), away
        for back in backs:
            _goes_back(follower, **back)
        follower.remember()
        followers[message["open"]] = follower
    elif "back" in message:
        _goes_back(followers[message["back"]], **message)
    elif "trained" in message:  # while the parent draws its pictures
        followers[message["trained"]].pack_models()
    elif "close" in message:
        follower = followers.pop(message["close"])
        tell(follower.finish(message["status"], message["tags"], message["timeout_s"]))


def _goes_back(follower: Follower, back: str, points: int, cut: str) -> None:
    assert str(follower.run_dir) == back
    follower.go_back(points, cut)


def following(message: dict[str, Any], children_of: str | None, secrets: list[str]) -> Follower:
    """Make the recorder's :class:`Follower` of a run that begins or resumes."""
    run_dir = Path(message["open"])
    told = reopened_run.taken_up(run_dir, message) if message.get("resumed") else None
    if told is None:
        return Follower(run_dir, message, children_of=children_of, secrets=secrets)
    return _going_on(run_dir, told, children_of, secrets)


def _going_on(run_dir: Path, told: Remembered, children_of: str | None = None, secrets: Sequence[str] = ()) -> Follower:
    """Make the :class:`Follower` that continues an earlier recorder's MLflow run from the last point sent."""
    return Follower(
        run_dir,
        told.run,
        told.run_id,
        told.sent_bytes,
        told.doubtful_bytes,
        asked=told.asked,
        again=told.again,
        children_of=children_of,
        secrets=list(secrets),
    )


def _mark_killed(follower: Follower) -> None:
    """The parent is gone without closing this run: its processes end, and what they write until then is not the last
    word."""
    if follower.hold is not None and not follower.hold.outlast(ENDING_S):
        return
    status_file = follower.run_dir / "status.json"
    try:
        status = json_text.read_object(status_file)
        leave(status_file, {**status, "state": "killed"})
    except (OSError, ValueError):
        pass
    redact.scrub(follower.run_dir, LOGS, follower.secrets)
    follower.finish("KILLED", {"trainer.ended": "the launcher was killed"}, LAST_WORDS_S)


def _watch(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except (ProcessLookupError, AttributeError, OSError):
        return []


def resend(run_dir: Path) -> int:
    """``python -m trainer.tracking.recorder resend RUN_DIR``: send what a finished run could not; returns exit code.

    Raises:
        UserError: the folder is of no tracked run, or of one that goes on.
    """
    _finished(run_dir)  # a folder of no run gets no lock
    hold = FolderLock(run_dir)
    try:
        if not hold.take():
            raise refusal(hold, f"resend {run_dir}", "the same command when that run has ended")
        return _resend(run_dir, *_finished(run_dir))
    finally:
        hold.leave()


def _finished(run_dir: Path) -> tuple[Remembered, dict[str, Any]]:
    """A tracked run's tracking.json and its result; the latter is empty if its launcher was killed.

    Raises:
        UserError: the folder is of no tracked run, or its result cannot be read.
    """
    told, path = tracking_file.read(run_dir), run_dir / "result.json"
    if told is None or not told.run.get("uri"):
        raise UserError(
            f"resend {run_dir}",
            "is no folder of a run that was tracked: it has no tracking.json that can be read",
            USAGE,
        )
    try:
        return told, json_text.read_object(path)
    except FileNotFoundError:
        return told, {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"resend {run_dir}",
            f"{path.name} in it cannot be read: {why(error)}",
            f"rm {quoted(str(path))}, and the same command sends it as a run that was killed",
        ) from error


def _resend(run_dir: Path, told: Remembered, result: dict[str, Any]) -> int:
    if HIDDEN in told.uri:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            print(
                f"error: the password of {told.uri} is not kept in the run's folder. Give the whole address "
                f"in MLFLOW_TRACKING_URI."
            )
            return 2
        told.run["uri"] = os.environ["MLFLOW_TRACKING_URI"]
    follower = _going_on(run_dir, told)
    if not result:
        print(
            "The run's launcher was killed: nobody has looked for secrets in the workers' logs, so they are not sent."
        )
        told.run["artifacts"] = [name for name in told.run.get("artifacts", ()) if name not in LOGS]
    status = {"done": "FINISHED", "failed": "FAILED"}.get(result.get("status", ""), "KILLED")
    answer = follower.finish(status, {}, 60.0)
    print(f"MLflow run {answer['run_id']}: {answer['unsent']} points unsent. {answer['error']}")
    return 1 if answer["error"] or answer["unsent"] else 0


USAGE = "python -m trainer.tracking.recorder resend RUN_FOLDER"


def main(argv: list[str]) -> int:
    """The recorder's command line: ``resend RUN_FOLDER`` from a user, or a process id from the launcher to follow."""
    if len(argv) == 1 and argv[0].isdigit():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stderr = open(os.devnull, "w", errors="replace")  # noqa: SIM115 (migrations and deprecations; errors go to the parent as answers)
        sys.stdout = sys.stderr  # MLflow says there where to look at a run; answers go to the true one
        interpreter.begin()
        with contextlib.suppress(ImportError):
            import mlflow  # noqa: F401  while the parent imports torch
        _follow(int(argv[0]), socket.socket(fileno=0))
        interpreter.leave(0)
    try:
        if len(argv) != 2 or argv[0] != "resend":
            what = " ".join(["python -m trainer.tracking.recorder", *argv])
            raise UserError(what, "sends what a finished run could not send to MLflow", USAGE)
        return resend(Path(argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    mlflow_settings.settle()
    sys.exit(main(sys.argv[1:]))
