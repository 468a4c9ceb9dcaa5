"""The line that a terminal shows while a command gets ready."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.terminal.streams import LogFile

WIPED = "\r\x1b[K"


def typed(folder: Path, *overrides: str, **environment: str) -> str:
    """All that a command line of the trainer writes to a terminal."""
    return on_terminal([sys.executable, "-m", "trainer", *overrides], folder, **environment)


def on_terminal(command: list[str], folder: Path | None = None, **environment: str) -> str:
    """All that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TERM": "xterm", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 2**16):
                parts.append(part)
        except OSError:  # Linux's word for the end of a terminal
            pass
    os.close(ours)
    return b"".join(parts).decode()


@pytest.mark.all
@pytest.mark.parametrize("overrides", [("optimizer.lrr=1",), ("-m", "optimizer.lrr=1,2"), ("--cfg", "job")])
def test_a_terminal_shows_at_once_what_is_waited_for_and_keeps_nothing_of_it(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    shown = typed(tmp_path, "+recipe=digits_lenet", *overrides)
    waits, wiped, rest = shown.partition(WIPED)
    assert waits == "reading the config ..." and wiped
    left = re.sub(rf"[^\r\n]*{re.escape(WIPED)}", "", rest)
    assert "..." not in left.partition("\n")[0] and left.startswith(("error: optimizer.lrr=", "name: "))


@pytest.mark.all
def test_nothing_of_it_where_nobody_would_see_it_go(tmp_path: Path) -> None:
    assert typed(tmp_path, "+recipe=digits_lenet", "optimizer.lrr=1", TERM="dumb").startswith("error: ")
    assert typed(tmp_path, "+recipe=digits_lenet", "verbosity=quiet", "optimizer.lrr=1").startswith("error: ")


def test_a_signal_leaves_its_sentence_alone_on_the_line() -> None:
    code = """
import os, signal
from trainer.host import early_signals
from trainer.terminal import streams
early_signals.install()
with streams.guarded():
    streams.wait_for("waiting")
    os.kill(os.getpid(), signal.SIGTERM)
"""
    shown = on_terminal([sys.executable, "-c", code])
    assert shown.startswith(f"waiting ...{WIPED}preempted: got SIGTERM ") and shown.count("\n") == 1


def test_a_forked_process_leaves_the_line_to_the_one_that_shows_it(tmp_path: Path) -> None:
    with LogFile(tmp_path / "screen", "wb") as screen:
        screen.show_fleeting("waiting")
        if not (child := os.fork()):
            screen.write(b" child")
            os._exit(0)
        os.waitpid(child, 0)
        screen.write(b"done")
    assert (tmp_path / "screen").read_bytes() == b"waiting child" + WIPED.encode() + b"done"
