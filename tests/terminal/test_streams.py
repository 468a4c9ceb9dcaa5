"""What a process prints passes a guard, also in the processes that are forked from it."""

from __future__ import annotations

import errno
import io
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.terminal.streams import Guard, LogFile


class Held(io.StringIO):
    """A stream whose writer stays in it until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.go.wait()
        return super().write(text)


def test_a_forked_process_prints_though_another_thread_was_printing_when_it_was_forked() -> None:
    held = Held()
    guard = Guard(held)
    guard.write("half a line of the parent's")
    printing = threading.Thread(target=guard.write, args=(", its end\n",))
    printing.start()
    held.entered.wait()
    there, here = os.pipe()
    if not (child := os.fork()):
        try:
            guard.stream = os.fdopen(here, "w")
            guard.write("the child's\n")
            guard.flush()
        finally:
            os._exit(0)
    os.close(here)
    held.go.set()
    printing.join()
    answered, _, _ = select.select([there], [], [], 60)
    told = os.read(there, 100) if answered else b""
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(there)
    assert told == b"the child's\n"
    assert held.getvalue() == "half a line of the parent's, its end\n"


def test_log_leaves_out_what_a_full_disk_refuses_and_says_how_much(tmp_path: Path) -> None:
    full, log = LogFile("/dev/full", "ab"), LogFile(tmp_path / "log", "ab")
    assert full.write(b"a line\n") == 7 and full.write(bytearray(b"another\n")) == 8
    assert full.left_out == 15
    log.left_out = full.left_out
    log.write(b"there is room\n")
    log.write(b"and more\n")
    text = (tmp_path / "log").read_text()
    assert text == "\n15 bytes of this log were left out: the disk was full\nthere is room\nand more\n"
    reads = LogFile(os.open(tmp_path / "log", os.O_RDONLY), "ab")
    with pytest.raises(OSError, match="Bad file descriptor"):
        reads.write(b"to a descriptor that cannot be written")


def test_process_goes_on_to_print_to_a_log_on_a_full_disk(tmp_path: Path) -> None:
    program = """
import os, sys
from trainer.terminal import streams
streams.to_log(os.open("/dev/full", os.O_WRONLY | os.O_APPEND))
for number in range(3000):
    print("a line", number)
    print("of errors", file=sys.stderr)
sys.exit(7 if sys.stdout.buffer.raw.left_out > 20_000 else 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


class Refusing(io.StringIO):
    """A stream whose file takes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


def test_who_prints_to_a_screen_on_a_full_disk_goes_on() -> None:
    guard = Guard(Refusing(errno.ENOSPC))
    print("a line that goes nowhere", file=guard, flush=True)
    guard.finish()
    with pytest.raises(BrokenPipeError):
        print("nobody reads", file=Guard(Refusing(errno.EPIPE)), flush=True)
