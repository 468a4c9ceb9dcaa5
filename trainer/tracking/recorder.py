"""A process of its own that carries runs' files to MLflow: in batches, off the training's path, resent when lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.report import replace_file

BATCH = 1000
EVERY_S = 1.0
LONGEST_PAUSE_S = 30.0
LAST_WORDS_S = 5.0


@dataclass
class Follower:
    """Follows one run folder's metrics.jsonl into one MLflow run; everything may be retried.

    ``tracking.json`` in the folder remembers the MLflow run and how many bytes of metrics.jsonl have been
    acknowledged, so that nothing is lost or sent twice when the server, or this process, goes away.
    """

    run_dir: Path
    run: dict[str, Any]
    run_id: str | None = None
    sent: int = 0
    described: bool = False
    pause: float = 0.0
    retry_at: float = 0.0
    away_since: float | None = None
    error: str = ""
    children_of: str | None = None
    client: Any = field(default=None, repr=False)

    def try_once(self) -> None:
        """Open the run if need be and send what is new; on an error, try again after a pause that doubles."""
        now = time.monotonic()
        if now < self.retry_at:
            return
        try:
            self._open()
            self._send_points()
        except Exception as error:  # whatever MLflow raises for a server that is away or in trouble: try again later
            self.error = _first_line(error)
            self.pause = min(LONGEST_PAUSE_S, max(1.0, self.pause * 2))
            self.retry_at = now + self.pause
            if self.away_since is None:
                self.away_since = now
                tell({"warning": f"the tracking server does not answer ({self.error}); training goes on, points are kept in {self.run_dir / 'metrics.jsonl'} and sent later"})  # fmt: skip
            return
        if self.away_since is not None:
            tell({"warning": "the tracking server answers again; all points so far are sent"})
        self.away_since, self.pause, self.error = None, 0.0, ""

    def _open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if self.client is None:
            self.client = MlflowClient(tracking_uri=self.run["uri"])
        if self.run_id is None:
            experiment = self.client.get_experiment_by_name(self.run["experiment"])
            experiment_id = (
                experiment.experiment_id
                if experiment is not None
                else self.client.create_experiment(self.run["experiment"])
            )
            tags = dict(self.run["tags"])
            if self.children_of is not None:
                tags["mlflow.parentRunId"] = self.children_of
            opened = self.client.create_run(
                experiment_id, start_time=self.run["start_time"], tags=tags, run_name=self.run["run_name"]
            )
            self.run_id = opened.info.run_id
            self.remember()
        if not self.described:
            params = [Param(k, str(v)[:6000]) for k, v in self.run["params"].items()]
            for start in range(0, len(params), 100):
                self.client.log_batch(self.run_id, params=params[start : start + 100])
            self.described = True

    def _new_lines(self) -> bytes:
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as points:
                points.seek(self.sent)
                new = points.read()
        except FileNotFoundError:
            return b""
        return new[: new.rfind(b"\n") + 1]

    def _send_points(self) -> None:
        from mlflow.entities import Metric

        new = self._new_lines()
        metrics: list[Any] = []
        consumed = 0
        for line in new.splitlines(keepends=True):
            point = json.loads(line)
            more = [Metric(k, v, point["time"], point["step"]) for k, v in point["metrics"].items()]
            if len(metrics) + len(more) > BATCH:
                self._acknowledged(metrics, consumed)
                metrics, consumed = [], 0
            metrics += more
            consumed += len(line)
        if consumed:
            self._acknowledged(metrics, consumed)

    def _acknowledged(self, metrics: list[Any], consumed: int) -> None:
        self.client.log_batch(self.run_id, metrics=metrics)
        self.sent += consumed
        self.remember()

    def remember(self) -> None:
        """Write tracking.json."""
        state = {"uri": self.run["uri"], "experiment": self.run["experiment"], "run_id": self.run_id, "sent_bytes": self.sent}  # fmt: skip
        if self.run_dir.is_dir():
            replace_file(self.run_dir / "tracking.json", json.dumps({**state, "run": self.run}, indent=1))

    def finish(self, status: str, tags: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """Send the rest, the artifacts and the end of the run, within the time."""
        until = time.monotonic() + timeout_s
        done = False
        while not done:
            self.try_once()
            if self.away_since is None:
                done = self._end(status, tags)
            if not done:
                if time.monotonic() > until:
                    break
                time.sleep(min(0.2, max(0.0, until - time.monotonic())) or 0.01)
        unsent = self._new_lines().count(b"\n")
        return {"closed": str(self.run_dir), "run_id": self.run_id, "unsent": unsent, "error": "" if done else self.error}  # fmt: skip

    def _end(self, status: str, tags: dict[str, str]) -> bool:
        try:
            for key, value in tags.items():
                self.client.set_tag(self.run_id, key, value)
            for name in self.run.get("artifacts", ()):
                for path in sorted(self.run_dir.glob(name)):
                    self.client.log_artifact(self.run_id, str(path))
            self.client.set_terminated(self.run_id, status)
        except Exception as error:  # as in try_once
            self.error = _first_line(error)
            return False
        return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def tell(message: dict[str, Any]) -> None:
    """An answer to the parent, which may be gone."""
    with contextlib.suppress(OSError):
        print(json.dumps(message), flush=True)


def follow(parent: int) -> None:
    """Serve the parent's messages until its end; then close what it left open as KILLED."""
    followers: dict[str, Follower] = {}
    gone = _watch(parent)
    buffered = b""
    next_round = 0.0
    while True:
        ready, _, _ = select.select([0, *gone], [], [], max(0.0, next_round - time.monotonic()))
        if any(fd != 0 for fd in ready):
            break
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), followers)
        if time.monotonic() >= next_round:
            for follower in followers.values():
                follower.try_once()
            next_round = time.monotonic() + EVERY_S
    for follower in followers.values():
        _mark_killed(follower)


def _obey(message: dict[str, Any], followers: dict[str, Follower]) -> None:
    if "open" in message:
        parent = followers.get(message.get("parent") or "")
        if parent is not None and parent.run_id is None:
            parent.try_once()
        follower = Follower(Path(message["open"]), message, children_of=parent.run_id if parent else None)
        follower.remember()
        followers[message["open"]] = follower
    elif "close" in message:
        follower = followers.pop(message["close"])
        tell(follower.finish(message["status"], message["tags"], message["timeout_s"]))


def _mark_killed(follower: Follower) -> None:
    """The parent is gone without closing this run."""
    status_file = follower.run_dir / "status.json"
    try:
        status = json.loads(status_file.read_text())
        replace_file(status_file, json.dumps({**status, "state": "killed"}, indent=1))
    except (OSError, ValueError):
        pass
    follower.finish("KILLED", {"trainer.ended": "the launcher was killed"}, LAST_WORDS_S)


def _watch(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except (ProcessLookupError, AttributeError, OSError):
        return []


def resend(run_dir: Path) -> int:
    """Send what a finished run could not send: ``python -m trainer.tracking.recorder resend RUN_DIR``."""
    state = json.loads((run_dir / "tracking.json").read_text())
    follower = Follower(run_dir, state["run"], run_id=state["run_id"], sent=state["sent_bytes"])
    result = json.loads((run_dir / "result.json").read_text()) if (run_dir / "result.json").exists() else {}
    status = {"done": "FINISHED", "failed": "FAILED"}.get(result.get("status", ""), "KILLED")
    answer = follower.finish(status, {}, 60.0)
    print(f"MLflow run {answer['run_id']}: {answer['unsent']} points unsent. {answer['error']}")
    return 1 if answer["error"] or answer["unsent"] else 0


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ["MLFLOW_LOGGING_LEVEL"] = os.environ.get("MLFLOW_LOGGING_LEVEL", "ERROR")
    if sys.argv[1] == "resend":
        sys.exit(resend(Path(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (migrations and deprecations; errors go to the parent as answers)
    follow(int(sys.argv[1]))
