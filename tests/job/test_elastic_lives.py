"""What a life of a run whose hosts come and go is told to be, without processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.errors import AskedToLeave, Interrupted
from trainer.host.notes_board import FolderBoard
from trainer.job.elastic import _described, _follow, _lobby, _of_life
from trainer.job.ready import get_ready
from trainer.launch.lobby import OVER, Guest, Life


@pytest.mark.parametrize(("hosts", "epoch"), [((0,), 14), ((0, 2), 14), ((0, 1, 2), 15)])
def test_updates_that_are_not_those_of_all_hosts_are_told(tmp_path: Path, hosts: tuple[int, ...], epoch: int) -> None:
    """1,438 samples in updates of 96: three workers pad the 15th, and others leave it out."""
    typed = [
        "+recipe=digits_lenet",
        "epochs=2",
        "launch.nnodes=1:3",
        "launch.master_addr=127.0.0.1",
        "launch.node_rank=0",
    ]
    with hydra_app() as app:
        ready = get_ready(commands.plain(compose(app, typed)), commands.typed_keys(typed), str(tmp_path))
    life = Life(2, hosts, tuple("abc"[: len(hosts)]), 29999, "")
    said = _described(life, _of_life(ready, life), ready.plan)
    assert ready.plan.total_steps == 30
    assert (f"; {2 * epoch} updates in total, not 30, and the learning rate" in said) == (epoch != 15)


@pytest.mark.parametrize("error", [AskedToLeave("got SIGUSR1"), Interrupted("got SIGINT")], ids=["asked", "Ctrl-C"])
def test_all_hosts_end_as_host_0_that_is_asked_to_leave_before_an_update(
    error: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler begins each of their commands again."""
    notes, run = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    run.mkdir()
    board = FolderBoard(notes)
    monkeypatch.setattr("trainer.launch.lobby_store.opened", lambda launch: contextlib.nullcontext(board))
    monkeypatch.setattr("trainer.job.elastic._terms", lambda ready: {})
    ready: Any = SimpleNamespace(
        plan=SimpleNamespace(run_dir=str(run), nnodes=2),
        checked=SimpleNamespace(config=SimpleNamespace(launch=None)),
    )
    with pytest.raises(type(error)), _lobby(ready):
        raise error
    assert board.check([OVER])
    with pytest.raises(BaseException, match=str(error)) as raised:
        _follow(lambda assignment: {}, ready, Guest(board, 1, "host 0"))
    assert (raised.type is AskedToLeave) == (type(error) is AskedToLeave)
