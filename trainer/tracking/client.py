"""The parent's side of tracking: starts the recorder process, opens and closes MLflow runs, waits for unsent points."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.host.signals import signal_name
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.tracking_file import read

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
MOST_STARTS = 6
"""Of recorder processes for one command, one after another."""


class Tracker:
    """The parent's handle on the recorder process of one command: for a run, or for a sweep and its runs.

    The recorder reads the run folders' files, so the training never waits for MLflow; it outlives a parent that is
    killed and then marks what was open as KILLED. Messages are JSON lines on its standard input, which is a Unix
    socket, and output. The message that opens a run brings the lock on its folder: a killed parent leaves it to the
    recorder, so that the run's next life does not begin before the recorder is done. When the recorder dies, another
    one gets all messages about the runs that are open, and goes on from their ``tracking.json``: each message may come
    twice.

    Args:
        say: shows a line to the user.
        away: why the store did not answer when it was tried before the start; empty as a rule.
    """

    def __init__(self, say: Callable[[str], None], away: str = "") -> None:
        self.say, self.away, self.opened = say, "", False
        if away:
            self.tell_away(away)
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.messages: list[dict[str, Any]] = []
        self.starts, self.ending, self.lock = 0, False, threading.Lock()
        with self.lock:  # one that dies at once is noticed by a thread that has to know of it
            self.process, self.way = self._start()

    def _start(self) -> tuple[subprocess.Popen[str], socket.socket]:
        """The recorder's process, and the way to it."""
        self.starts += 1
        way, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # this interpreter with this package's module; no shell  # nosec B603
                [sys.executable, "-m", "trainer.tracking.recorder", str(os.getpid())],
                stdin=its.fileno(),
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(process,), daemon=True, name="tracking-answers").start()
        return process, way

    def tell_away(self, why: str) -> None:
        """Tell the user that the store did not answer before the start, and that training goes on."""
        self.away = why
        self.say(
            f"MLflow: the tracking server does not answer ({why}); training goes on, points are kept and sent "
            f"when it does"
        )

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    self._hear(json_text.loads(line))
        self._start_again(process)

    def _hear(self, answer: dict[str, Any]) -> None:
        if said := answer.get("warning") or answer.get("told"):
            self.say(f"MLflow: {said}")
            return
        with self.lock:
            self.messages = [one for one in self.messages if _subject(one) != answer.get("closed")]
        self.answers.put(answer)

    def _start_again(self, dead: subprocess.Popen[str]) -> None:
        """Another recorder in place of one that died; none where it was to end, or after too many."""
        how = _ending(dead.wait())
        with self.lock:
            if self.ending:
                return
            again = self.starts < MOST_STARTS
            if again:
                self.way.close()
                self.process, self.way = self._start()
                for message in for_another(self.messages):
                    self._write(message)
        if again:
            self.say(f"MLflow: the tracking process {how}; another one goes on with the points that are not sent")
        else:
            self.say(
                f"MLflow: the tracking process {how}, the {MOST_STARTS}th of this command; training goes on, "
                f"points are kept in metrics.jsonl"
            )
            self.answers.put({"gone": True})

    def _send(self, message: dict[str, Any]) -> None:
        with self.lock:
            self.messages.append(message)
            self._write(message)

    def _write(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it has died: who comes next gets all messages
            if run_dir := message.get("open"):
                _send_with_hold(self.way, message, Path(run_dir))
            else:
                self.way.sendall(_line(message))

    def open(self, run_dir: Path, run: Mapping[str, Any]) -> None:
        """Open an MLflow run for a run folder; returns at once.

        Args:
            run_dir: the run's folder; ``metrics.jsonl`` in it is followed.
            run: ``uri``, ``experiment``, ``run_name``, ``tags``, ``params``, ``parent`` (a folder, or None).
        """
        self.opened = True
        self._send({"open": str(run_dir), **run, "away": self.away})

    def go_back(self, run_dir: Path, points: int, cut: str) -> None:
        """Tell the recorder that metrics.jsonl was cut to ``points`` bytes and will grow again; returns at once."""
        self._send({"back": str(run_dir), "points": points, "cut": cut})

    def trained(self, run_dir: Path) -> None:
        """Tell the recorder that a run's model is there and can be packed; returns at once."""
        self._send({"trained": str(run_dir)})

    def close(self, run_dir: Path, status: str, tags: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        """Have the recorder send the rest of a run, its artifacts and its end; waits at most ``timeout_s``.

        Args:
            status: FINISHED, FAILED or KILLED.

        Returns:
            ``run_id`` (or None), ``unsent`` points, ``error``.
        """
        self._send({"close": str(run_dir), "status": status, "tags": dict(tags), "timeout_s": timeout_s})
        until = time.monotonic() + timeout_s + 2
        while (left := until - time.monotonic()) > 0:
            try:
                answer = self.answers.get(timeout=left)
            except queue.Empty:
                break
            if answer.get("closed") == str(run_dir):
                return answer
            if answer.get("gone"):
                self.answers.put(answer)  # for the runs after this one
                return _remembered(run_dir, "the tracking process died")
        return _remembered(run_dir, f"no answer within {timeout_s:g} s (tracking.flush_timeout_s)")

    def end(self) -> None:
        """End the recorder process, at once if it has no run to send."""
        with self.lock:
            self.ending = True
        if not self.opened:
            self.process.kill()
        self.way.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send_with_hold(way: socket.socket, message: Mapping[str, Any], run_dir: Path) -> None:
    hold = FolderLock(run_dir)
    try:
        if hold.descriptor >= 0 and hold.share():
            hold.send(way, _line({**message, "held": True}))
        else:
            way.sendall(_line(message))
    finally:
        hold.leave()


def _subject(message: Mapping[str, Any]) -> str:
    """The folder of the run that a message is about."""
    return str(next(filter(None, map(message.get, ("open", "back", "trained", "close")))))


def for_another(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """What the parent tells another recorder again: each run's message, with how far the run has gone back
    meanwhile."""
    for message in messages:
        if run_dir := message.get("open"):
            backs = [one for one in messages if one.get("back") == run_dir]
            yield {**message, "resumed": True, "backs": backs}
        elif "back" not in message:
            yield message


def _ending(code: int) -> str:
    """How a process ended, as a part of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def environment() -> dict[str, str]:
    """The environment variables for a process that asks MLflow: ours, with this package on its PYTHONPATH."""
    path = os.pathsep.join([str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _remembered(run_dir: Path, error: str) -> dict[str, Any]:
    """What the recorder had sent, from ``tracking.json``, if it gives no answer itself."""
    told = read(run_dir)
    if told is None:
        return {"run_id": None, "unsent": 0, "error": error}
    unsent = 0
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as points:
        points.seek(told.sent_bytes)
        unsent = points.read().count(b"\n")
    return {"run_id": told.run_id, "unsent": unsent, "error": error}


@contextlib.contextmanager
def tracking(uri: str, away: str = "") -> Iterator[Tracker | None]:
    """Context manager: yields the :class:`Tracker`, a client of the process that records to MLflow; None without.

    Args:
        away: why the store did not answer when it was tried.
    """
    if not uri:
        yield None
        return
    from trainer.terminal.screen import Screen

    tracker = Tracker(lambda line: Screen().print(line), away)
    try:
        yield tracker
    finally:
        tracker.end()
