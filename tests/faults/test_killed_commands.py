"""A command of several trainings that is killed with SIGKILL leaves no process, at whatever moment."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests import pace
from tests.runs import start_afresh

SMALL = ("+recipe=digits_lenet", "execution.threads=1", "tracking=none")
COMMANDS = {
    "scaling": ("mode=scaling", "launch.nproc=2", "hydra.run.dir=run"),
    "lr_find": ("mode=lr_find", "launch.nproc=2", "hydra.run.dir=run"),
    "sweep": ("-m", "launch.nproc=1,2", "sweep.parallel=2", "hydra.sweep.dir=run"),
}
LONG = {
    "scaling": ("scaling.updates=1000000",),
    "lr_find": ("lr_find.updates=100000",),
    "sweep": ("epochs=100000", "validation=false"),
}
MARK = "TRAINER_TESTS_MARK"
MOMENTS = 7
LONGEST_S = 12.0


def command(name: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a command, from a new Python: all that it starts has the folder in its environment."""
    first = COMMANDS[name][:1] if COMMANDS[name][0] == "-m" else ()
    return start_afresh(*first, *SMALL, *COMMANDS[name][len(first) :], *more, cwd=folder, **{MARK: str(folder)})


def started_in(folder: Path) -> list[psutil.Process]:
    """The living processes of the command of this folder."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if one.environ().get(MARK) == str(folder) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def workers(folder: Path) -> Sequence[Path]:
    """Files of points of trainings that train."""
    return [path for path in folder.glob("run/**/metrics.jsonl") if path.stat().st_size]


@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "trainings"),
    [
        ("scaling", 1),
        pytest.param("lr_find", 1, marks=pytest.mark.long),
        pytest.param("sweep", 2, marks=pytest.mark.all),
    ],
)
def test_no_process_outlives_a_command_that_is_killed_while_workers_train(
    tmp_path: Path, name: str, trainings: int
) -> None:
    with command(name, tmp_path, *LONG[name]) as process:
        try:
            pace.wait_for(lambda: process.poll() or len(workers(tmp_path)) == trainings, 120, "workers train")
            assert process.poll() is None
            assert len(started_in(tmp_path)) >= 4, "the command, its forkserver and two workers"
        finally:
            process.kill()
    pace.wait_for(lambda: not started_in(tmp_path), 20, "no process is left")


@pytest.mark.long
@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("name", COMMANDS)
def test_no_process_outlives_a_command_that_is_killed_at_any_moment(tmp_path: Path, name: str, moment: int) -> None:
    draw = random.Random(moment)
    with command(name, tmp_path) as process:
        time.sleep(draw.uniform(0.0, LONGEST_S))
        os.kill(process.pid, 9)
    pace.wait_for(lambda: not started_in(tmp_path), 20, "no process is left")
