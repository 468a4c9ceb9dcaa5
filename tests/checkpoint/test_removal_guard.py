"""A checkpoint of another run that goes on, which removes it while it is read: nobody goes on from a part of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer
from tests.checkpoint.test_identity import DIGITS
from tests.notes import Notes
from tests.strategies.pserver.harness import config
from tests.strategies.pserver.played import Played
from tests.strategies.pserver.test_start_fails import seat
from trainer.checkpoint import store
from trainer.checkpoint.durable_folder import MARKER
from trainer.checkpoint.removal_guard import not_removed_meanwhile
from trainer.errors import RunFailed
from trainer.planning.launcher import Assignment
from trainer.strategies.pserver.server import server as server_module
from trainer.weights.server_files import part_name
from trainer.worker import resuming

GONE = (
    r"resume={}: the run that wrote this checkpoint has removed it since it was found .* Type instead: resume={}, "
    r"whose newest"
)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other" / "checkpoints" / "step-000000007"
    folder.mkdir(parents=True)
    (folder / part_name(0)).touch()
    (folder / MARKER).write_text("{}")
    return folder


def gone(other: Path) -> str:
    return GONE.format(other, other.parent.parent)


def replaced(folder: Path) -> None:
    (folder / MARKER).write_text('{"of": "another life"}')


@pytest.mark.parametrize("remove", [store._remove, shutil.rmtree, replaced])
@pytest.mark.parametrize("fails", [True, False])
def test_what_was_read_of_a_checkpoint_that_is_gone_is_not_taken(
    remove: Callable[[Path], None], fails: bool, other: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=gone(other)), not_removed_meanwhile(str(other), tmp_path / "run"):
        remove(other)
        if fails:
            raise FileNotFoundError("worker-0.safetensors")


def test_what_was_gone_before_it_was_read_is_not_taken(other: Path, tmp_path: Path) -> None:
    store._remove(other)
    with pytest.raises(RunFailed, match=gone(other)), not_removed_meanwhile(str(other), tmp_path / "run"):
        pass


def test_other_errors_stay_what_they_are(other: Path, tmp_path: Path) -> None:
    for resume, run in ((str(other), "run"), (str(other), "other"), ("", "run")):
        with pytest.raises(ValueError, match="another size"), not_removed_meanwhile(resume, tmp_path / run):
            raise ValueError("the saved fc has another size")
        with not_removed_meanwhile(resume, tmp_path / run):
            pass


@pytest.mark.parametrize("where", ["Server", "opened_ledger"])
def test_server_that_opens_says_so(where: str, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config("async", 1, ledger=True)
    run["plan"]["paths"]["run_dir"], run["resume"] = str(tmp_path / "run"), str(other)

    def fails(*told: Any) -> None:
        store._remove(other)
        raise FileNotFoundError(part_name(0))

    monkeypatch.setattr(server_module, where, fails)
    if where == "Server":
        monkeypatch.setattr(server_module, "opened_ledger", lambda *told: None)
    with pytest.raises(RunFailed, match=gone(other)):
        server_module.open_server(seat(str(tmp_path)), Assignment.of(run))


def test_server_that_is_given_the_start_says_so(other: Path, tmp_path: Path) -> None:
    play = Played(tmp_path / "run", Notes())
    play.server.parameters.resume = str(other)
    store._remove(other)
    with pytest.raises(RunFailed, match=gone(other)):
        play.starts()


@pytest.mark.all
def test_worker_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.run([*DIGITS, "max_steps=2", f"hydra.run.dir={tmp_path}/other"])
    (checkpoint,) = store.found(tmp_path / "other" / "checkpoints")
    resume = resuming.resume

    def late(*told: Any) -> None:
        store._remove(checkpoint)
        resume(*told)

    monkeypatch.setattr(resuming, "resume", late)
    with pytest.raises(RunFailed, match=gone(checkpoint)):
        trainer.run(
            [
                *DIGITS,
                "max_steps=4",
                "resume.allow_changes=true",
                f"resume={checkpoint}",
                f"hydra.run.dir={tmp_path}/run",
            ]
        )
