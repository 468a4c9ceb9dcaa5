"""A training goes on when nobody takes what it prints, and says so where it can be read. Whose output is the result
fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import SMALL, environment, read, zygote


@pytest.mark.parametrize("how", ["no reader", pytest.param("full disk", marks=pytest.mark.long)])
def test_run_goes_on_and_its_result_says_what_was_not_taken(how: str, tmp_path: Path) -> None:
    reader, screen = os.pipe() if how == "no reader" else (None, os.open("/dev/full", os.O_WRONLY))
    if reader is not None:
        os.close(reader)
    with (tmp_path / "errors.txt").open("w") as errors:
        argv = [*SMALL, "tracking=none", "hydra.run.dir=run"]
        process = zygote().start(argv, tmp_path, environment(), screen, errors.fileno(), "trainer", spares=1)
        os.close(screen)
        code = process.wait(120)
    told = f"standard output: {'Broken pipe' if reader is not None else 'No space left on device'}"
    assert (code, read(tmp_path / "run" / "result.json")["not_printed"]) == (0, told)
    assert told in (tmp_path / "errors.txt").read_text() and read(tmp_path / "run" / "status.json")["state"] == "done"
    assert "[Epoch 0] validation loss" in (tmp_path / "run" / "workerlog.0").read_text()


CONFIG = ("trainer", "+recipe=digits_lenet", "--cfg", "job")


@pytest.mark.all
@pytest.mark.parametrize(
    "command",
    [
        CONFIG,
        ("trainer", "+recipe=digits_lenet", "tracking=none", "plan=true"),
        ("trainer", "--version"),
        ("trainer", "--help"),
        ("trainer.checkpoints", "list", "."),
        ("trainer.checkpoints", "--help"),
    ],
    ids=" ".join,
)
def test_command_fails_whose_answer_a_full_disk_does_not_take(command: tuple[str, ...], tmp_path: Path) -> None:
    (damaged := tmp_path / "checkpoints" / "step-000000001").mkdir(parents=True)
    (damaged / "checkpoint.json").write_text("{}")
    with open("/dev/full", "w") as full:
        done = typed(command, tmp_path, full.fileno())
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert (
        done.stderr.startswith("failed: ")
        and "No space left on device" in done.stderr
        and "standard output" in done.stderr
    )


@pytest.mark.all
def test_command_is_content_with_a_reader_who_leaves(tmp_path: Path) -> None:
    reader, screen = os.pipe()
    os.close(reader)
    done = typed(CONFIG, tmp_path, screen)
    os.close(screen)
    assert (done.returncode, done.stderr) == (0, "")


def typed(command: tuple[str, ...], folder: Path, out: int) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own."""
    words = [sys.executable, "-m", *command]
    return subprocess.run(
        words, cwd=folder, env=environment(), stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
    )
