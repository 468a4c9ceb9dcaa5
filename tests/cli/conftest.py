"""Command lines in this process, in an empty folder, on a machine without GPUs; nothing may start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer import __main__
from trainer.cli import sweep_run
from trainer.host import hardware
from trainer.job import job

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: an empty one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """``--info`` sets up Hydra's logging for a process that ends with it; this one goes on."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run(
    logging_restored: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command line; returns exit code, what it printed, and its errors."""

    def started(*args: object, **kwargs: object) -> None:
        pytest.fail("a run was started")

    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(job, "execute", started)
    monkeypatch.setattr(sweep_run, "execute", started)

    def run(*argv: str) -> tuple[int, str, str]:
        code = __main__.main(list(argv))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
