"""A training goes on when nobody takes what it prints, and says so where it can be read."""

from __future__ import annotations

import os
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
