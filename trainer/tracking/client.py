"""The parent's side of tracking: starts the recorder process, opens and closes runs, waits for unsent points."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.host.signals import beginning_undisturbed, signal_name
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock
from trainer.tracking.contract import TrackedRun

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
MOST_STARTS = 6
"""Of recorder processes for one command, one after another."""
SILENT_S, LONG_S = 2.0, 10.0
"""How long the end of a run waits for trackers before the user is told: for one that has failed, and for others."""


@dataclass(frozen=True)
class Ended:
    """How a run ended at one tracker.

    Attributes:
        id: of the run there, or None. where: how it is opened. group: id of the group of runs that it belongs to.
        unsent: lines of metrics.jsonl. error: what went wrong.
    """

    id: str | None = None
    where: str = ""
    group: str = ""
    unsent: int = 0
    error: str = ""


class RecorderProcess:
    """The parent's handle on the recorder process of one command: for a run, or for a sweep and its runs.

    The recorder reads the run folders' files, so the training never waits for a tracker; it outlives a parent that is
    killed and then marks what was open as KILLED. Messages are JSON lines on its standard input, which is a Unix
    socket, and output. The message that opens a run brings the lock on its folder: a killed parent leaves it to the
    recorder, so that the run's next life does not begin before the recorder is done. When the recorder dies, another
    one gets all messages about the runs that are open, and goes on from their ``tracking.json``: each message may come
    twice.

    Args:
        say: shows a line to the user.
        trackers: the nodes of ``tracking.trackers``, by name.
    """

    def __init__(self, say: Callable[[str], None], trackers: Mapping[str, Mapping[str, Any]]) -> None:
        self.say, self.trackers, self.opened = say, dict(trackers), False
        self.away: dict[str, str] = {}
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.messages: list[dict[str, Any]] = []
        self.starts, self.ending, self.lock = 0, False, threading.Lock()
        with self.lock:  # one that dies at once is noticed by a thread that has to know of it
            self.process, self.way = self._start()

    def _start(self) -> tuple[subprocess.Popen[str], socket.socket]:
        """Start the recorder's process; returns it with the socket to it."""
        self.starts += 1
        way, its = socket.socketpair()
        targets = [{"_target_": node["_target_"]} for node in self.trackers.values()]
        with its, beginning_undisturbed():
            process = subprocess.Popen(  # this interpreter with this package's module; no shell  # nosec B603
                [sys.executable, "-m", "trainer.tracking.recorder", str(os.getpid()), json.dumps(targets)],
                stdin=its.fileno(),
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(process,), daemon=True, name="tracking-answers").start()
        return process, way

    def mark_away(self, name: str, why: str) -> None:
        """Tell the user that a tracker's service did not answer before the start, and that training goes on."""
        self.away[name] = why
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
        if line := answer.get("says"):
            self.say(line)
        else:
            self.answers.put(answer)

    def _start_again(self, dead: subprocess.Popen[str]) -> None:
        """Start another recorder in place of one that died; none where it was to end, or after too many."""
        how = _ending(dead.wait())
        with self.lock:
            if self.ending:
                return
            again = self.starts < MOST_STARTS
            if again:
                self.way.close()
                self.process, self.way = self._start()
                for message in self.messages:
                    self._write(repeated(message))
        if again:
            self.say(f"the tracking process {how}; another one goes on with the points that are not sent")
        else:
            self.say(
                f"the tracking process {how}, the {MOST_STARTS}th of this command; training goes on, "
                f"points are kept in metrics.jsonl"
            )
            self.answers.put({"gone": True})

    def _send(self, message: dict[str, Any]) -> None:
        with self.lock:
            self.messages.append(message)
            self._write(message)

    def _write(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it has died: who comes next gets all messages
            if message["do"] == "open":
                _send_with_hold(self.way, message)
            else:
                self.way.sendall(_line(message))

    def open(self, run_dir: Path, run: TrackedRun, secrets: list[str]) -> None:
        """Open a run at its trackers; returns at once.

        Args:
            run_dir: the run's folder; ``metrics.jsonl`` in it is followed.
            secrets: values that the recorder must not show.
        """
        self.opened = True
        self._send({"do": "open", "folder": str(run_dir), "run": asdict(run), "secrets": secrets, "away": self.away})

    def go_back(self, run_dir: Path, points: int) -> None:
        """Tell the recorder that metrics.jsonl was cut to ``points`` bytes and will grow again; returns at once."""
        self._send({"do": "back", "folder": str(run_dir), "points": points})

    def trained(self, run_dir: Path) -> None:
        """Tell the recorder that a run's model is there and can be packed; returns at once."""
        self._send({"do": "trained", "folder": str(run_dir)})

    def close(self, run_dir: Path, status: str, tags: Mapping[str, str], timeout_s: float) -> dict[str, Ended]:
        """Have the trackers send the rest of a run, its artifacts and its end; waits at most ``timeout_s``.

        Args:
            status: FINISHED, FAILED, KILLED, or RUNNING of a run that a later command goes on with.

        Returns:
            By the trackers' names, how the run ended there.
        """
        end = {"status": status, "tags": dict(tags), "timeout_s": timeout_s}
        self._send({"do": "close", "folder": str(run_dir), **end})
        ended = dict(self._answers(run_dir, timeout_s))
        with self.lock:
            self.messages = [one for one in self.messages if one["folder"] != str(run_dir)]
        late = f"no answer within {timeout_s:g} s (tracking.flush_timeout_s)"
        why = "the tracking process died" if self.starts >= MOST_STARTS and self.process.poll() is not None else late
        return {name: ended.get(name) or _remembered(run_dir, name, why) for name in self.trackers}

    def _answers(self, run_dir: Path, timeout_s: float) -> Iterator[tuple[str, Ended]]:
        """Yield how a run ended at each tracker, until all have answered."""
        began, left = time.monotonic(), set(self.trackers)
        until, tell_at = began + timeout_s + 2, began + SILENT_S
        while left and (now := time.monotonic()) < until:
            try:
                answer = self.answers.get(timeout=max(0.0, min(until, tell_at) - now))
            except queue.Empty:
                errors = {name: tracking_file.position(run_dir, name).error for name in sorted(left)}
                tell_at += SILENT_S
                if any(errors.values()) or tell_at > began + LONG_S:
                    self.say(_waiting(errors, timeout_s))
                    tell_at = math.inf
                continue
            if answer.get("gone"):
                self.answers.put(answer)  # for the runs after this one
                return
            if answer.get("closed") == str(run_dir):
                left.discard(answer["tracker"])
                yield answer["tracker"], Ended(*(answer[name] for name in ("id", "where", "group", "unsent", "error")))

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


def repeated(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for another recorder, in place of one that may have obeyed it."""
    return {**message, "run": {**message["run"], "resumed": True}} if message["do"] == "open" else message


def _send_with_hold(way: socket.socket, message: Mapping[str, Any]) -> None:
    hold = FolderLock(Path(message["folder"]))
    try:
        if hold.descriptor >= 0 and hold.share():
            hold.send(way, _line({**message, "held": True}))
        else:
            way.sendall(_line(message))
    finally:
        hold.leave()


def _ending(code: int) -> str:
    """How a process ended, as a part of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def environment() -> dict[str, str]:
    """The environment variables for a process of trackers: ours, with the modules that this process can import now, as
    those of the run that ``eval RUN`` measures."""
    path = os.pathsep.join([str(PACKAGE_PARENT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


def _waiting(errors: Mapping[str, str], timeout_s: float) -> str:
    """The line that says for which trackers the end of a run waits, and how long.

    Args:
        errors: by the trackers' names, why each has not taken everything; '' where it is not known.
    """
    trackers = ", ".join(f"{name} ({error})" if error else name for name, error in errors.items())
    return f"waiting at most {timeout_s:g} s for {trackers} to get the rest of the run"


def _remembered(run_dir: Path, name: str, error: str) -> Ended:
    """What a tracker had sent, from ``tracking.json``, if it gives no answer itself."""
    tracked = tracking_file.read(run_dir)
    position = tracked.trackers.get(name) if tracked is not None else None
    if position is None:
        return Ended(error=error)
    unsent = 0
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as points:
        points.seek(position.sent_bytes)
        unsent = points.read().count(b"\n")
    return Ended(position.id, unsent=unsent, error=error)


@contextlib.contextmanager
def tracking(trackers: Mapping[str, Mapping[str, Any]]) -> Iterator[RecorderProcess | None]:
    """Context manager: yields the :class:`RecorderProcess` of these trackers; None where there are none."""
    if not trackers:
        yield None
        return
    from trainer.terminal.screen import Screen

    process = RecorderProcess(lambda line: Screen().print(line), trackers)
    try:
        yield process
    finally:
        process.end()
