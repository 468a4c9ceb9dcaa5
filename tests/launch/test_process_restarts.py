"""Who is started again: after the one before is dead for certain."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.test_supervisor import Scripted
from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.errors import Died, RunFailed
from trainer.host import pulse
from trainer.host.notes_board import FolderBoard
from trainer.job.check import get_ready
from trainer.job.ready import Ready
from trainer.launch.engine import Start
from trainer.launch.first_failure import failed_first
from trainer.launch.process import Failure
from trainer.launch.process_restarts import ProcessRestarts
from trainer.launch.start import _roles
from trainer.launch.started_process import Role, StartedProcess
from trainer.planning.launcher import Deaths
from trainer.strategies.seat import Address, Life
from trainer.worker import coming_back


def test_process_whose_forkserver_was_killed_is_ended_before_another_begins(tmp_path: Path) -> None:
    """Its exit code is made up, and it goes on meanwhile: its updates are counted when it is dead."""
    seems_dead, beat = Scripted(tmp_path / "0", code=255), pulse.make(tmp_path / "pulse")
    heard: list[str] = []

    def ends(number: int) -> None:
        heard.append("ended")
        pulse.Pulse(str(beat)).update(9)

    seems_dead.signal = ends  # type: ignore[method-assign, assignment]
    role = Role("worker", 1, "none:none", ["cpu"], apart=True, restartable=True)
    told = Start(
        role, 0, SimpleNamespace(resume=""), None, Address(), Life(pulse=str(beat)), 0, {}, tmp_path / "0", tmp_path
    )  # type: ignore[arg-type]
    member = StartedProcess(role, 0, seems_dead, 1)

    def begin(start: object) -> Scripted:
        heard.append("begun")
        return Scripted(tmp_path / "1")

    returns = ProcessRestarts(Deaths(3), {"worker 0": told}, begin, [member])
    assert returns.restart(member, Died("worker 0 ended with exit code 255", "worker 0")) is not None
    assert heard == ["ended", "begun"] and returns.before == ("worker 0", 9)


class Worker:
    """A worker that can be started again: each of its lives has done one more update when it dies.

    Attributes:
        starts: how often it was.
    """

    def __init__(self, folder: Path) -> None:
        self.pulse = pulse.make(folder / "pulse")
        self.role = Role("worker", 1, "none:none", ["cpu"], apart=True, restartable=True)
        payload: Any = SimpleNamespace(resume="")
        life = Life(pulse=str(self.pulse))
        self.start = Start(self.role, 0, payload, None, Address(), life, 0, {}, folder / "0", folder)  # type: ignore[arg-type]
        self.lives = 0

    def returns(self, deaths: Deaths) -> ProcessRestarts:
        """As those of one life of all processes."""
        return ProcessRestarts(deaths, {"worker 0": self.start}, lambda start: Scripted(start.log), [])

    def dies(self, returns: ProcessRestarts) -> bool:
        """Whether it is started again."""
        self.lives += 1
        pulse.Pulse(str(self.pulse)).update(self.lives)
        member = StartedProcess(self.role, 0, Scripted(self.start.log, code=-9), self.lives)
        return returns.restart(member, Died("worker 0 was killed by SIGKILL", "worker 0", self.lives)) is not None


def test_deaths_that_lie_days_apart_are_all_made_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, worker = [0.0], Worker(tmp_path)
    deaths = Deaths(3, lambda: now[0])
    returns = worker.returns(deaths)
    for _ in range(20):
        now[0] += 86400.0
        assert worker.dies(returns)
    assert "restart 4 of 3" not in capsys.readouterr().out
    assert deaths.restart(Died("server 0 was killed by SIGKILL", "server 0")) == "restart 2 of 3"


@pytest.mark.parametrize("seed", range(200))
def test_restarts_within_an_hour_are_counted_together_whether_of_one_process_or_of_all(
    seed: int, tmp_path: Path
) -> None:
    draw, now, worker = random.Random(seed), [0.0], Worker(tmp_path)
    most, done = draw.randint(0, 4), list[float]()
    deaths = Deaths(most, lambda: now[0])
    returns = worker.returns(deaths)
    for number in range(40):
        now[0] += draw.choice((1.0, 600.0, 1500.0, 4000.0, 90000.0))
        may = sum(now[0] - when <= 3600.0 for when in done) < most
        if draw.random() < 0.7:
            assert worker.dies(returns) == may
        elif may:
            assert deaths.restart(Died("server 0 died", "server 0", number)).startswith("restart ")
            returns = worker.returns(deaths)
        else:
            with pytest.raises(RunFailed):
                deaths.restart(Died("server 0 died", "server 0", number))
        done += [now[0]] * may


def test_process_is_started_again_by_itself_if_it_has_died_and_not_twice_after_the_same_update(tmp_path: Path) -> None:
    worker, deaths = Worker(tmp_path), Deaths(9)
    returns = worker.returns(deaths)
    lost = RunFailed("worker 0 was declared lost: nothing was heard of it for 10 s")  # it stood still, and ends now
    assert returns.restart(StartedProcess(worker.role, 0, Scripted(worker.start.log, code=1), 1), lost) is None
    assert worker.dies(returns)
    worker.lives -= 1
    assert not worker.dies(returns), "after the same update"
    assert worker.dies(returns), "after another one"
    worker.role = replace(worker.role, restartable=False)
    assert not worker.dies(returns), "where the others cannot let it in"
    assert deaths.left() == 9 - 2 and len(deaths.returned) == 2


def test_worker_that_was_to_come_back_at_a_checkpoint_which_is_not_there_has_another_process_started(
    tmp_path: Path,
) -> None:
    """Its writer was lost meanwhile; the next checkpoint may be there. But not where the run is over, or all others are
    lost."""
    worker, board = Worker(tmp_path), FolderBoard(tmp_path)
    deaths, seat = Deaths(9), SimpleNamespace(store=board, rank=0, life=Life(5), size=2)
    returns = worker.returns(deaths)

    def again(come_back: Callable[[], object]) -> bool:
        ended = Scripted(worker.start.log, code=1)
        with pytest.raises(RunFailed) as why:
            come_back()
        ended.failure = Failure.of(why.value)
        member = StartedProcess(worker.role, 0, ended, 5)
        return returns.restart(member, failed_first([member])) is not None

    board.set("fenced/worker/1", "its process ended")
    assert again(lambda: coming_back.wait_for(lambda: False, seat, "step-000000009", 1))  # type: ignore[arg-type]
    why = "worker 0: it cannot come back without a checkpoint: worker 1, which wrote it, was lost"
    assert deaths.returned == [why]
    pulse.Pulse(str(worker.pulse)).update(1)
    assert not again(lambda: coming_back.let_in(seat))  # type: ignore[arg-type]
    board.set("fenced/worker/1", "")
    board.set("done/worker/1", "well")
    assert not again(lambda: coming_back.let_in(seat))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def composed() -> Iterator[Callable[..., Ready]]:
    with hydra_app() as app:

        def ready(*overrides: str) -> Ready:
            typed = ["+recipe=digits_lenet", "tracking=none", "device=cpu", "launch.nproc=2", *overrides]
            return get_ready(commands.plain(compose(app, typed)), commands.typed_keys(typed), "somewhere")

        yield ready


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        (("strategy=pserver_async",), {"worker"}),
        (("strategy=pserver_geo",), {"worker"}),
        (("strategy=pserver_ssp", "data.work=static"), set()),
        (("strategy=pserver_geo", "checkpoint=none"), set()),
        (("strategy=pserver_async", "plan=true", "launch.nnodes=2"), set()),
        (("strategy=pserver_sync",), set()),
        (("strategy=pserver_sync", "strategy.on_lost_worker=continue"), set()),
        (("strategy=collective",), set()),
    ],
)
def test_who_is_started_again_while_the_others_go_on(
    overrides: tuple[str, ...], who: set[str], composed: Callable[..., Ready]
) -> None:
    """A worker, where others do its work meanwhile. A server's death takes all back to the newest checkpoint."""
    made = composed(*overrides)
    roles = _roles(made.plan, made.checked.config)
    assert {role.name for role in roles if role.restartable} == who
