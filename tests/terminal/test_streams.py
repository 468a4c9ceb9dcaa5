"""What a process prints passes a guard, also in the processes that are forked from it."""

from __future__ import annotations

import errno
import io
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.terminal.streams import Guard, LogFile, _Tee


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


@pytest.mark.parametrize("how", ["no reader", "closed", "only read"])
def test_log_goes_on_without_whatever_else_it_cannot_write(how: str, tmp_path: Path) -> None:
    """Once that is known it does not try again; only a full disk may get room."""
    (tmp_path / "log").touch()
    reader, number = os.pipe() if how == "no reader" else (None, os.open(tmp_path / "log", os.O_RDONLY))
    log = LogFile(number, "wb", closefd=how != "closed")
    os.close(reader if reader is not None else number) if how != "only read" else None
    assert [log.write(b"a line\n") for _ in range(3)] == [7, 7, 7]
    assert log.gone and log.error == (errno.EPIPE if how == "no reader" else errno.EBADF)


def test_log_waits_for_a_reader_where_somebody_has_made_the_pipe_non_blocking() -> None:
    reader, number = os.pipe()
    os.set_blocking(number, False)
    taken: list[bytes] = []
    text = bytes(range(256)) * 1000  # more than a pipe holds
    with LogFile(number, "wb") as log:
        thread = threading.Thread(
            target=lambda: [taken.append(some) for some in iter(lambda: os.read(reader, 1 << 16), b"")]
        )
        thread.start()
        assert log.write(text) == len(text) and not log.error
    thread.join(60)
    os.close(reader)
    assert b"".join(taken) == text


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


PRINTS = """
import os, subprocess, sys
from pathlib import Path
from trainer.terminal import streams
from trainer.terminal.screen import Screen
with streams.guarded():
    taken = os.open("kept", os.O_WRONLY | os.O_CREAT)
    for number in range(3000):
        print("a line", number)
        Screen().print("and another")
    print("of errors", file=sys.stderr)
    sys.__stdout__.write("of a library")
    child = subprocess.run(["true"]).returncode
    Path("told").write_text(f"{taken > 2} {child} {streams.not_taken()}")
"""


@pytest.mark.parametrize(
    ("shell", "lost"),
    [
        ("<&- >&- 2>&-", "standard output: Bad file descriptor; standard error: Bad file descriptor"),
        ("2>&1 | head -1", "standard output: Broken pipe; standard error: Broken pipe"),
        ("> /dev/full", "standard output: No space left on device"),
        ("2> /dev/full > all", "standard error: No space left on device"),
        ("> all", ""),
    ],
)
def test_process_goes_on_though_nobody_takes_what_it_prints(shell: str, lost: str, tmp_path: Path) -> None:
    """Nor does what it writes go into a file that got the number of a closed descriptor."""
    command = f'"$0" -c "$1" {shell}; echo "${{PIPESTATUS[0]}}" > code'
    done = subprocess.run(["bash", "-c", command, sys.executable, PRINTS], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "code").read_text() == "0\n" and "Error" not in done.stderr
    assert (tmp_path / "told").read_text() == f"True 0 {lost}" and (tmp_path / "kept").read_bytes() == b""
    if "all" in shell.split():
        assert (tmp_path / "all").read_text().count("a line") == 3000


class FullDisk(io.StringIO):
    """A log on a full disk, which another thread finds full while this one's text is on its way to it."""

    name = "log"

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.others = method, 1
        self.other: Callable[[], object] = lambda: None

    def _fail(self, method: str) -> None:
        if method == self.method and self.others:
            self.others -= 1
            self.other()
        if method == self.method:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, text: str) -> int:
        self._fail("write")
        return len(text)

    def flush(self) -> None:
        self._fail("flush")


@pytest.mark.parametrize("method", ["write", "flush"])
def test_threads_that_print_while_the_disk_of_the_log_is_full_go_on(method: str) -> None:
    screen, log = io.StringIO(), FullDisk(method)
    tee = _Tee(screen, log)
    log.other = (lambda: tee.write("theirs\n")) if method == "write" else tee.flush
    tee.write("ours\n")
    tee.flush()
    said = "log is not written any more: No space left on device"
    assert sorted(screen.getvalue().splitlines()) == sorted([said, "ours", *(["theirs"] if method == "write" else [])])
