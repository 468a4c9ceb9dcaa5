"""What a life of a run whose hosts come and go is told to be, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import composed
from trainer.errors import AskedToLeave, Died, Interrupted, RunFailed
from trainer.host.notes_board import FolderBoard
from trainer.job import elastic
from trainer.job.elastic import _described, _failure, _follow, _Leading, _lobby, _missed, _planned_for
from trainer.launch.lobby import OVER, Guest, Host, Life, names_of


@pytest.mark.parametrize(("hosts", "epoch"), [((0,), 14), ((0, 2), 14), ((0, 1, 2), 15)])
def test_updates_that_are_not_those_of_all_hosts_are_told(tmp_path: Path, hosts: tuple[int, ...], epoch: int) -> None:
    """1,438 samples in updates of 96: three workers pad the 15th, and others leave it out."""
    typed = "+recipe=digits_lenet epochs=2 launch.nnodes=1:3 launch.master_addr=127.0.0.1 launch.node_rank=0".split()
    ready = composed.ready(*typed, run_dir=str(tmp_path))
    life = Life(2, len(hosts), 0, names_of(hosts), 29999, "")
    said = _described(life, _planned_for(ready, life), ready.plan)
    assert ready.plan.length.total_steps == 30
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
    monkeypatch.setattr("trainer.job.elastic.open_lobby", lambda launch: board)
    monkeypatch.setattr("trainer.job.elastic._terms", lambda ready: {})
    ready: Any = SimpleNamespace(
        plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(run)), topology=SimpleNamespace(nnodes=2)),
        checked=SimpleNamespace(config=SimpleNamespace(launch=None)),
    )
    with pytest.raises(type(error)), _lobby(ready):
        raise error
    assert board.check([OVER])
    with pytest.raises(BaseException, match=str(error)) as raised:
        _follow(lambda assignment, supervision: {}, ready, Guest(board, 1, "host 0", 2))
    assert (raised.type is AskedToLeave) == (type(error) is AskedToLeave)


def leading(folder: Path, lives: list[tuple[dict[str, Any] | None, RunFailed | None]]) -> _Leading:
    """Host 0 of a run whose lives end so; host 1 is lost in each."""
    launch = SimpleNamespace(max_restarts=3, timeout_s=60)
    ready: Any = SimpleNamespace(
        plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(folder))),
        checked=SimpleNamespace(config=SimpleNamespace(launch=launch)),
        assignment=SimpleNamespace(resume=""),
    )
    lobby: Any = SimpleNamespace(
        how="failed",
        settle=lambda timeout_s: [],
        lost=lambda: [1],
        parts=lambda: {1: Host("a")},
        resized=False,
        death_of=lambda hosts: Died("host 1 is lost", "host 1 in life 1"),
    )
    host = _Leading(lambda assignment, supervision: {}, ready, None, None, lobby)  # type: ignore[arg-type]
    host._live = lambda resume: lives.pop(0)  # type: ignore[method-assign]
    return host


def test_signal_that_comes_to_host_0_when_all_updates_are_done_changes_nothing(tmp_path: Path) -> None:
    host = leading(tmp_path, [({"ended": "all updates done", "asked": "SIGTERM"}, None)])
    assert host.to_the_end() == {"ended": "all updates done"} and host.lobby.how == "done"


@pytest.mark.parametrize("kind", [RunFailed, lambda why: Died(why, "host 1")], ids=["told", "found"])
def test_host_0_that_was_asked_to_leave_before_a_host_was_lost_begins_no_other_life(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("host 1 is lost")
    error.asked = "SIGTERM"
    host = leading(tmp_path, [(None, error), (None, error)])
    with pytest.raises(AskedToLeave, match="got SIGTERM"):
        host.to_the_end()
    monkeypatch.setattr(elastic.store, "newest_whole", lambda folder, verify: folder)
    monkeypatch.setattr(elastic.store, "about", lambda folder: SimpleNamespace(done=6))
    assert host.to_the_end() == {"ended": "preempted", "steps": 6} and host.lobby.how == "preempted"


def test_only_a_death_after_a_request_is_the_end_of_a_life_and_not_of_the_run() -> None:
    death, ended = Died("worker 1 was killed", "worker 1"), Interrupted("got SIGTERM, and then worker 1 was killed")
    ended.__cause__ = death
    with pytest.raises(Interrupted):
        _failure(ended)
    death.asked = "SIGTERM"
    assert _failure(ended) is death
    with pytest.raises(AskedToLeave):
        _failure(AskedToLeave("got SIGTERM"))
    assert str(_failure(AskedToLeave("host 1 has ended the run", elsewhere=True))) == "host 1 has ended the run"


def test_a_host_that_comes_back_is_told_that_it_was_lost() -> None:
    assert [_missed(last, now) for last, now in ((0, 1), (0, 4), (2, 3))] == ["", "", ""]
    assert "this host was lost to the others in life 2: life 3 went on without it" in _missed(2, 4)
    assert "in life 2: lives 3 to 5 went on without it" in _missed(2, 6)
