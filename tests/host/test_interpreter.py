"""What a command saves at its start and end: no collection while modules are imported, no taking apart; nothing is
lost."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from trainer.host import interpreter

LEAVING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from trainer.host import interpreter

class Last:
    def __del__(self):
        print("taken apart")

kept = Last()
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print("thread done")))
atexit.register(lambda: print("at exit"))
sys.stdout.write("no newline at the end, ")
sys.stderr.write("nor here")
interpreter.leave(7)
"""


def test_leaving_waits_for_threads_calls_what_is_registered_and_flushes() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stdout == "no newline at the end, thread done\nat exit\n" and done.stderr == "nor here"


def test_leaving_for_a_reader_who_has_gone_is_silent() -> None:
    code = "from trainer.host import interpreter; print('x' * 100); interpreter.leave(0)"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # empty: as if it were not there
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_at_work_and_the_callers_setting_stays(collecting: bool) -> None:
    frozen = gc.get_freeze_count()
    try:
        gc.enable() if collecting else interpreter.begin()
        with interpreter.at_work():
            assert gc.isenabled()
        assert gc.isenabled() == collecting
        if collecting:
            assert gc.get_freeze_count() == frozen, "in somebody else's process nothing is kept from the collector"
    finally:
        gc.unfreeze()
        gc.enable()


def test_command_has_its_children_though_its_parent_ignores_theirs() -> None:
    code = """
import os
from trainer.host import interpreter

def main():
    child = os.fork()
    if not child:
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with interpreter.command() as codes:
    codes.append(main())
"""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", ignoring, sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
