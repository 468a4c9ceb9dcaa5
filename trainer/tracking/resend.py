"""``python -m trainer.tracking.recorder resend RUN_FOLDER``: sends what a finished run could not send."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.secret_parts import HIDDEN
from trainer.errors import UserError, why
from trainer.host import json_text
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock, refusal
from trainer.run_folder.tracking_file import Tracked
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import Follower, OpenRun
from trainer.tracking.trackers import LOGS, made
from trainer.wording import counted, quoted

PATIENCE_S = 60.0
USAGE = "python -m trainer.tracking.recorder resend RUN_FOLDER"
STATUS = {"done": "FINISHED", "failed": "FAILED"}
"""The status at a service, by that in result.json."""


def main(argv: list[str]) -> int:
    """``resend RUN_FOLDER``; returns the exit code, and prints why it cannot be done."""
    try:
        if len(argv) != 2 or argv[0] != "resend":
            what = " ".join(["python -m trainer.tracking.recorder", *argv])
            raise UserError(what, "sends what a finished run could not send to its trackers", USAGE)
        return resend(Path(argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def resend(run_dir: Path) -> int:
    """Send what a finished run could not; returns the exit code.

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


def _finished(run_dir: Path) -> tuple[Tracked, dict[str, Any]]:
    """A tracked run's tracking.json and its result; the latter is empty if its launcher was killed.

    Raises:
        UserError: the folder is of no tracked run, or its result cannot be read.
    """
    tracked, path = tracking_file.read(run_dir), run_dir / "result.json"
    if tracked is None or not tracked.run.get("trackers"):
        raise UserError(
            f"resend {run_dir}",
            "is no folder of a run that was tracked: it has no tracking.json that can be read",
            USAGE,
        )
    try:
        return tracked, json_text.read_object(path)
    except FileNotFoundError:
        return tracked, {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"resend {run_dir}",
            f"{path.name} in it cannot be read: {why(error)}",
            f"rm {quoted(str(path))}, and the same command sends it as a run that was killed",
        ) from error


def _resend(run_dir: Path, tracked: Tracked, result: dict[str, Any]) -> int:
    run = replace(TrackedRun.of(tracked.run), folder=str(run_dir), resumed=True)
    if HIDDEN in str(run.mlflow.get("uri", "")):
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            print(
                f"error: the password of {run.mlflow['uri']} is not kept in the run's folder. Give the whole address "
                f"in MLFLOW_TRACKING_URI."
            )
            return 2
        run = replace(run, mlflow={**run.mlflow, "uri": os.environ["MLFLOW_TRACKING_URI"]})
    if not result:
        print(
            "The run's launcher was killed: nobody has looked for secrets in the workers' logs, so they are not sent."
        )
        run = replace(run, artifacts=[name for name in run.artifacts if name not in LOGS])
    failed = False
    opened = OpenRun(run, tracked.trackers, print)
    for name, node in run.trackers.items():
        tracker = made(name, node, run_dir)
        answer = Follower(name, tracker, opened).finish(STATUS.get(result.get("status", ""), "KILLED"), {}, PATIENCE_S)
        left = f"{counted(answer['unsent'], 'line')} of metrics.jsonl unsent"
        print(f"{tracker.title or name} run {answer['id']}: {left}. {answer['error']}".rstrip())
        failed |= bool(answer["error"] or answer["unsent"])
    return int(failed)
