"""Launchers of a user's own, for the tests."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from trainer.launch.tasks import Task, TaskLauncher
from trainer.planning.launcher import Launcher


class Commands(TaskLauncher):
    """Starts each process as a plain command."""

    def launch(self, task: Task) -> Any:
        (task.log.parent / f"variables.{task.role}.{task.rank}.json").write_text(json.dumps(dict(task.environment)))
        return subprocess.Popen(task.command, env={**os.environ, **task.environment})


class Refuses(Launcher):
    """Wants one worker more, whatever there is."""

    def refuse(self, config: Any, workers: int, others: int) -> Any:
        from trainer.errors import UserError

        return [UserError(f"launch.nproc={workers}", "is too few", f"launch.nproc={workers + 1}")]

    def start(self, assignment: Any, supervision: Any) -> Any:
        raise AssertionError("it was refused")


def no_launcher(**config: Any) -> str:
    """Takes what a launcher takes."""
    return "none"


class Silent(Launcher):
    """Starts nothing, and returns nothing."""

    def start(self, assignment: Any, supervision: Any) -> Any:
        return None
