"""The supervisor, over handles that no process stands behind: what ends a run, and what the others do without."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.notes import Notes
from trainer.errors import Died, RunFailed
from trainer.launch.process import Failure
from trainer.launch.started_process import Role, StartedProcess
from trainer.launch.supervisor import LINGER_S, HostResults, Supervisor, end


@dataclass
class Scripted:
    """A handle that ends as it is told, after so many looks."""

    log: Path
    after: int = 1
    code: int = 0
    value: Any = None
    failure: Failure | None = None
    returned: bool = False
    looks: int = 0
    heard: list[str] = field(default_factory=list)

    @property
    def exitcode(self) -> int | None:
        return self.code if self.looks >= self.after else None

    @property
    def well(self) -> bool:
        return self.exitcode == 0 and self.returned

    def poll(self) -> None:
        self.looks += 1
        self.returned = self.looks >= self.after and self.code == 0

    def signs(self) -> list[Any]:
        return []

    def dismiss(self) -> None:
        self.heard.append("dismiss")

    def signal(self, number: signal.Signals) -> None:
        self.heard.append(number.name)
        if number == signal.SIGKILL and self.exitcode is None:
            self.code, self.after = -9, self.looks

    def join(self, seconds: float) -> None:
        pass


def watched(handles: list[Scripted], apart: bool, notes: Notes, seconds: float = 0.0) -> HostResults:
    role = Role("worker", len(handles), "none:none", ["cpu"] * len(handles), apart=apart)
    now = iter(range(10**6))
    members = [StartedProcess(role, rank, handle) for rank, handle in enumerate(handles)]
    return Supervisor(members, [notes], lambda signs, wait: None, lambda: next(now) * seconds).watch()


def test_what_the_entries_returned_is_given_back_by_role_and_rank(tmp_path: Path) -> None:
    handles = [Scripted(tmp_path / f"{n}", after=3 - n, value=f"of {n}") for n in range(3)]
    assert watched(handles, False, Notes()).of == {"worker": {0: "of 0", 1: "of 1", 2: "of 2"}}


def test_one_that_fails_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    words = Failure(time.monotonic_ns(), "the cause", True)
    handles = [Scripted(tmp_path / "0", after=9), Scripted(tmp_path / "1", code=1, failure=words)]
    with pytest.raises(RunFailed, match=f"^worker 1: the cause\n  its log: {tmp_path}/1$"):
        watched(handles, False, Notes())


def test_others_go_on_without_one_that_was_killed_and_are_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handles = [Scripted(tmp_path / "0", after=5, value=1), Scripted(tmp_path / "1", code=-9)]
    notes = Notes()
    found = watched(handles, True, notes)
    assert found.of["worker"] == {0: 1} and found.lost[1].startswith("worker 1 was killed by SIGKILL (out of memory?)")
    assert notes == {"lost/worker/1": "its process ended", "done/worker/0": "its process has done its work"}
    assert "the others go on without it" in capsys.readouterr().out


def test_the_last_one_cannot_be_done_without_nor_one_that_says_the_run_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="worker 0 was killed by SIGKILL"):
        watched([Scripted(tmp_path / "0", code=-9)], True, Notes())
    ends = Failure(time.monotonic_ns(), "no such data", True, ends_run=True)
    with pytest.raises(RunFailed, match="no such data"):
        watched([Scripted(tmp_path / "0", after=9), Scripted(tmp_path / "1", code=1, failure=ends)], True, Notes())


@pytest.mark.parametrize(("first_rank", "serves", "goes_on"), [(2, True, True), (2, False, False), (0, True, False)])
def test_a_host_whose_only_worker_dies_serves_the_workers_of_other_hosts(
    first_rank: int, serves: bool, goes_on: bool, tmp_path: Path
) -> None:
    """But host 0 does not: it keeps the results of the first worker. Without a server it has nothing left to do."""
    role = Role("worker", 3, "none:none", ["cpu"], first_rank, apart=True)
    members = [StartedProcess(role, first_rank, Scripted(tmp_path / "worker", code=-9))]
    if serves:
        served = Scripted(tmp_path / "server", after=5, value="served")
        members.append(StartedProcess(Role("server", 2, "none:none", ["cpu"], 1), 1, served))
    notes = Notes()
    supervisor = Supervisor(members, [notes], lambda signs, wait: None)
    if goes_on:
        found = supervisor.watch()
        assert found.of == {"worker": {}, "server": {1: "served"}} and [*found.lost] == [first_rank]
        assert notes == {f"lost/worker/{first_rank}": "its process ended"}
    else:
        with pytest.raises(RunFailed, match=f"worker {first_rank} was killed by SIGKILL"):
            supervisor.watch()
        assert supervisor.ends_all == serves


@pytest.mark.parametrize("follows", [True, False])
def test_what_a_worker_has_from_a_server_of_one_that_died_is_not_the_cause(tmp_path: Path, follows: bool) -> None:
    """The server's own error may come later. The death has ended the run: with it all processes can be started
    again."""
    told = Failure(time.monotonic_ns(), "worker 0 was lost: its process ended", True, ends_run=True, follows=follows)
    handles = [Scripted(tmp_path / "0", code=-9), Scripted(tmp_path / "1", after=3, code=1, failure=told)]
    with pytest.raises(RunFailed) as ended:
        watched(handles, True, Notes())
    assert isinstance(ended.value, Died) == follows
    assert str(ended.value).startswith("worker 0 was killed by SIGKILL" if follows else "worker 1: worker 0 was lost")


def test_processes_that_all_others_have_declared_lost_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    stopped = Scripted(tmp_path / "1", after=10**9)
    notes = Notes({"fenced/worker/1": "silent for 30 s"})
    found = watched([Scripted(tmp_path / "0", value=1), stopped], True, notes, seconds=LINGER_S)
    assert found.of["worker"] == {0: 1} and found.lost == {1: "worker 1 was lost and is ended: silent for 30 s"}


def silent(
    tmp_path: Path, rank: int, others: list[StartedProcess], notes: Notes
) -> tuple[Supervisor, Scripted, list[RunFailed]]:
    """The supervisor of a stopped worker and of others on its host."""
    stopped, now, deaths = Scripted(tmp_path / "stopped", after=10**9), iter(range(10**6)), list[RunFailed]()
    role = Role("worker", 3, "none:none", ["cpu"], rank, apart=True)
    members = [StartedProcess(role, rank, stopped, life=7), *others]
    supervisor = Supervisor(members, [notes], lambda signs, wait: None, lambda: float(next(now)))
    supervisor.restart = lambda member, death: deaths.append(death)
    return supervisor, stopped, deaths


SILENCE = "worker {} was lost and is ended: silent for 30 s\n  its log: {}/stopped"


def test_worker_of_which_servers_hear_nothing_is_ended_at_once(tmp_path: Path) -> None:
    """Another process may be started in its place. A note about a life before, or one that was taken back, ends
    nobody."""
    role = Role("worker", 3, "none:none", ["cpu"] * 2, apart=True)
    handles = [Scripted(tmp_path / f"{n}", after=9, value=1) for n in range(2)]
    others = [StartedProcess(role, rank, handle, life=6) for rank, handle in zip((0, 2), handles, strict=True)]
    notes = Notes({"silent/worker/1/7": "silent for 30 s", "silent/worker/0/5": "silent", "silent/worker/2/6": ""})
    supervisor, stopped, deaths = silent(tmp_path, 1, others, notes)
    words = SILENCE.format(1, tmp_path)
    assert supervisor.watch().lost == {1: words}
    assert [str(death) for death in deaths] == [words] and isinstance(deaths[0], Died)
    assert stopped.heard == ["SIGKILL"] and notes["lost/worker/1/7"] == "silent for 30 s"
    assert all("SIGKILL" not in handle.heard for handle in handles)


@pytest.mark.parametrize(("rank", "serves"), [(0, False), (0, True), (2, False), (2, True)])
def test_host_whose_only_worker_is_silent_ends_as_if_it_had_died(tmp_path: Path, rank: int, serves: bool) -> None:
    """Unless it serves the workers of others; but host 0 keeps what the run comes to. The others hear of it by
    ``ends_all``."""
    served = Scripted(tmp_path / "server", after=5, value="served")
    server = StartedProcess(Role("server", 2, "none:none", ["cpu"], 1), 1, served)
    notes = Notes({f"silent/worker/{rank}/7": "silent for 30 s"})
    supervisor, stopped, _ = silent(tmp_path, rank, [server] * serves, notes)
    if rank and serves:
        assert supervisor.watch().lost == {rank: SILENCE.format(rank, tmp_path)}
    else:
        with pytest.raises(Died) as ended:
            supervisor.watch()
        assert str(ended.value) == SILENCE.format(rank, tmp_path) and supervisor.ends_all == serves
    assert stopped.heard == ["SIGKILL"]


@pytest.mark.parametrize("words", ["", "the loss is not finite"])
def test_what_a_worker_sends_as_it_is_ended_for_its_silence_counts(tmp_path: Path, words: str) -> None:
    """It woke at that moment, and has done its work, or tells why the run cannot go on."""
    role = Role("worker", 3, "none:none", ["cpu"] * 2, apart=True)
    other = StartedProcess(role, 0, Scripted(tmp_path / "0", after=9, value=1), life=6)
    supervisor, wakes, _ = silent(tmp_path, 1, [other], Notes({"silent/worker/1/7": "silent for 30 s"}))
    kill = wakes.signal

    def says(number: signal.Signals) -> None:
        kill(number)
        wakes.value, wakes.failure = 2, Failure(time.monotonic_ns(), words, True, ends_run=True) if words else None
        wakes.poll = lambda: setattr(wakes, "returned", not words)  # type: ignore[method-assign]

    wakes.signal = says  # type: ignore[method-assign]
    if words:
        with pytest.raises(RunFailed, match=f"^worker 1: {words}"):
            supervisor.watch()
    else:
        found = supervisor.watch()
        assert found.of["worker"] == {0: 1, 1: 2} and not found.lost


def test_worker_that_has_done_its_work_is_not_ended_for_its_silence(tmp_path: Path) -> None:
    done, now = Scripted(tmp_path / "1", value=2), iter(range(10**6))
    done.returned = True
    role = Role("worker", 2, "none:none", ["cpu"] * 2, apart=True)
    members = [StartedProcess(role, 0, Scripted(tmp_path / "0", value=1), 6), StartedProcess(role, 1, done, 7)]
    Supervisor(
        members, [Notes({"silent/worker/1/7": "silent"})], lambda signs, wait: None, lambda: float(next(now))
    ).watch()
    assert "SIGKILL" not in done.heard


def test_worker_that_was_let_in_again_is_waited_for(tmp_path: Path) -> None:
    found = watched(
        [Scripted(tmp_path / "0", value=1), Scripted(tmp_path / "1", after=9, value=2)],
        True,
        Notes({"fenced/worker/1": ""}),
        seconds=LINGER_S,
    )
    assert found.of == {"worker": {0: 1, 1: 2}}


TOO_LATE = "it was started again, and the run was over before it could take part"


def test_worker_that_comes_back_when_all_others_have_ended_is_not_waited_for(tmp_path: Path) -> None:
    now = iter(range(10**6))
    done, back = Scripted(tmp_path / "0", value=1), Scripted(tmp_path / "1", after=10**9)
    role = Role("worker", 2, "none:none", ["cpu"] * 2, apart=True)
    members = [StartedProcess(role, 0, done), StartedProcess(role, 1, back, life=7, returns=True)]
    found = Supervisor(members, [Notes()], lambda signs, wait: None, lambda: next(now) * LINGER_S).watch()
    assert found.of["worker"] == {0: 1} and found.lost == {1: f"worker 1 was lost and is ended: {TOO_LATE}"}


def test_life_that_follows_one_that_was_let_in_is_not_waited_for_either(tmp_path: Path) -> None:
    """It said goodbye, died before its process had ended, and was started again: the servers have ended, and nobody
    lets it in."""
    now = iter(range(10**6))
    done, dies, back = (
        Scripted(tmp_path / "0", value=1, after=3),
        Scripted(tmp_path / "1", code=-9),
        Scripted(tmp_path / "2", after=10**9),
    )
    role = Role("worker", 2, "none:none", ["cpu"] * 2, apart=True)
    members = [StartedProcess(role, 0, done), StartedProcess(role, 1, dies, life=7, returns=True)]
    third = StartedProcess(role, 1, back, life=8, returns=True)
    supervisor = Supervisor(
        members,
        [Notes({"fenced/worker/1": "", "admitted/worker/1/7": "0"})],
        lambda signs, wait: None,
        lambda: next(now) * LINGER_S,
    )
    supervisor.restart = lambda member, death: third
    found = supervisor.watch()
    assert found.of["worker"] == {0: 1} and found.lost == {1: f"worker 1 was lost and is ended: {TOO_LATE}"}


@pytest.mark.parametrize("words", ["worker 1 was declared lost: nothing was heard of it for 30 s", "ValueError: 3"])
def test_one_that_the_others_do_without_may_take_its_time_to_end(tmp_path: Path, words: str) -> None:
    """A thread of its own holds its process. It is ended, and was no death: nobody takes its place."""
    told = Failure(time.monotonic_ns() - int(2 * LINGER_S * 1e9), words, True)
    lingers = Scripted(tmp_path / "1", after=10**9, failure=told)
    role = Role("worker", 2, "none:none", ["cpu"] * 2, apart=True)
    members = [
        StartedProcess(role, 0, Scripted(tmp_path / "0", after=9, value=1), 7),
        StartedProcess(role, 1, lingers, 8),
    ]
    deaths = list[RunFailed]()
    found = Supervisor(
        members, [Notes()], lambda signs, wait: None, restart=lambda member, death: deaths.append(death)
    ).watch()
    assert found.of["worker"] == {0: 1} and found.lost == {1: f"worker 1: {words}\n  its log: {tmp_path}/1"}
    assert lingers.heard.count("SIGKILL") == 1 and [type(death) for death in deaths] == [RunFailed]


def test_all_end_by_force(tmp_path: Path) -> None:
    handle = Scripted(tmp_path / "0")
    end([handle], 0.0)
    assert handle.heard == ["SIGKILL", "dismiss"]
