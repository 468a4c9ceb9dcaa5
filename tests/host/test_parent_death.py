"""A process that belongs to another one does not outlive it, even if that one dies before the process can watch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment

PARENT = """
import multiprocessing, os, time
from trainer.data.reading_processes import reading_process
from trainer.host.parent_death import killed_with_parent

def child(number):
    while os.getppid() == parent:
        time.sleep(0.01)
    number = tied(number) if tied else number
    time.sleep(3)  # a thread may end this process
    os.write(1, b"outlives")

parent, tied = os.getpid(), None
"""
TIED = {
    "a command": "end = killed_with_parent()\ntied = lambda number: end()",
    "a reading process": "tied = reading_process",
}


@pytest.mark.all
@pytest.mark.parametrize("name", [*TIED, "nothing"])
def test_a_process_ends_that_is_tied_to_a_parent_which_is_dead_already(tmp_path: Path, name: str) -> None:
    start = 'multiprocessing.get_context("fork").Process(target=child, args=(0,)).start()\nos.kill(parent, 9)'
    code = "\n".join([PARENT, TIED.get(name, ""), start])
    done = subprocess.run([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, cwd=tmp_path)
    assert done.stdout == (b"outlives" if name == "nothing" else b""), "the pipe is closed when the child has ended"


def test_a_slot_of_a_sweep_ends_that_begins_after_the_death_of_the_sweep(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    answers, its = os.pipe()
    command = [sys.executable, "-m", "trainer.cli.sweep_slot", str(gone.pid), str(its), ""]
    slot = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(its,), env=environment(), cwd=tmp_path)
    os.close(its)
    try:
        assert slot.wait(60) == 1, "its jobs are not awaited"
    finally:
        slot.kill()
        os.close(answers)
