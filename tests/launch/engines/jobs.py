"""A job of two hosts whose command is a program that a test writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainer.launch.engines.contract import Job


def job_with(program: str, folder: Path, **more: Any) -> Job:
    """The job: its hosts run this Python program, with ``-m trainer`` and the words as arguments."""
    (path := folder / "task.py").write_text(program)
    return Job(
        name="digits",
        words=("environment", "name='a $b c'"),
        folder=folder / "run",
        command=(sys.executable, str(path)),
        started_in=str(folder),
        hosts=2,
        **more,
    )
