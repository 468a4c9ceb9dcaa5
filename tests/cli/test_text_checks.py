"""Names and values that are not UTF-8 are refused at once, in a sentence, before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.runs import environment
from trainer.cli.commands import run as run_from_python
from trainer.errors import UserError

DIGITS = "+recipe=digits_lenet"
BYTE = os.fsdecode(b"\xff")


def refused(found: tuple[int, str, str], *says: str) -> None:
    code, out, error = found
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1, error
    assert not [word for word in (*says, "\\xff, which is not UTF-8", "Type instead: ") if word not in error], error


@pytest.mark.parametrize(
    "typed",
    [
        f"hydra.run.dir=a{BYTE}",
        f"name='a{BYTE}'",
        f"data.root='/b{BYTE}'",
        f"resume='/b{BYTE}'",
        f"foo{BYTE}=1",
        f"--foo{BYTE}",
        f"--config-dir=/b{BYTE}",
        f"hydra.job.name='{BYTE}'",
    ],
)
def test_a_word_of_the_command_line_is_named(run: Run, folder: Path, typed: str) -> None:
    for more in ((), ("plan=true",), ("-m", "optimizer.lr=0.1,0.2")):
        refused(run(DIGITS, typed, *more), typed.replace(BYTE, "\\xff"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("key", ["name", "hydra.run.dir", "tracking.experiment"])
def test_a_value_from_the_environment_is_named(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("FOO", f"a{BYTE}")
    refused(run(DIGITS, f"{key}=${{oc.env:FOO}}"), "=", "a\\xff")
    assert list(folder.iterdir()) == []


def test_the_working_folder_is_named_wherever_the_run_goes(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := folder / f"b{BYTE}").mkdir()
    monkeypatch.chdir(here)
    for more in ((), (f"hydra.run.dir={folder}/x",), ("-m", "optimizer.lr=0.1,0.2", f"hydra.sweep.dir={folder}/x")):
        refused(run(DIGITS, *more), f"the working folder {folder}/b\\xff")
    with pytest.raises(UserError, match="the working folder"):
        run_from_python([DIGITS])
    assert (list(here.iterdir()), list(folder.iterdir())) == ([], [here])


def test_half_a_pair_of_utf_16_is_named(run: Run) -> None:
    code, _, error = run(DIGITS, "name='a\ud83d'")
    assert code == 2 and "holds \\ud83d, which is not UTF-8" in error


def test_locale_without_letters_beyond_ascii_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", DIGITS, "hydra.run.dir=ü", "plan=true"]
    told = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "the locale of this command has ascii alone. Type instead: PYTHONUTF8=1 python -m trainer" in done.stderr
    assert list(tmp_path.iterdir()) == []
