"""Descriptors of a process that launches again and again, as a notebook or a sweep does."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.entries import exits, tells
from trainer.errors import RunFailed
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.started_process import Role

pytestmark = pytest.mark.usefixtures("warm")
TAKEN = 1030
"""Select takes no descriptor above 1,023."""


def workers(entry: object, size: int) -> Role:
    return Role("worker", size, f"{entry.__module__}:{entry.__qualname__}", ["cpu"] * size)  # type: ignore[attr-defined]


def open_files() -> dict[str, str]:
    """By number, what is open in this process."""
    there = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            there[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the list itself
            continue
    return there


def test_launches_beside_a_thousand_open_files_leave_none_open(tmp_path: Path) -> None:
    """Also while nobody collects garbage."""
    launch([workers(tells, 2)], "quietly", tmp_path, Rendezvous())  # what is opened once for all launches is open
    with ExitStack() as held:
        for _ in range(TAKEN):
            held.callback(os.close, os.dup(1))
        before = open_files()
        gc.disable()
        try:
            launch([workers(tells, 2)], "quietly", tmp_path, Rendezvous())
            with pytest.raises(RunFailed, match="worker 1"):
                launch([workers(exits, 3)], None, tmp_path, Rendezvous())
            assert open_files() == before
        finally:
            gc.enable()
