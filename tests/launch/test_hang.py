"""Who is named when no worker makes progress, over random histories of deaths, returns and workers that are done."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launch.test_supervisor import Scripted
from tests.notes import Notes
from trainer.errors import Died, Missing, RunFailed
from trainer.host import pulse
from trainer.launch import first_failure, hang
from trainer.launch.hang import Hang
from trainer.launch.process import Failure
from trainer.launch.silent_workers import SilentWorkers
from trainer.launch.started_process import Role, StartedProcess
from trainer.launch.supervisor import STAY_S, Supervisor
from trainer.strategies.lost_workers import ADMITTED

NEVER = 10**9
LIMIT_S = 6.0


@dataclass
class Worker(Scripted):
    """A worker that works until it is told otherwise."""

    after: int = NEVER
    updates: int = 0
    done: bool = False
    stopped: bool = False

    def poll(self) -> None:
        self.looks += 1
        self.returned = self.done

    def dump(self) -> bool:
        if not self.stopped:
            self.log.write_text(self.log.read_text() + 'Current thread\n  File "there.py"\n')
        return True


class History:
    """Workers of a run of async die, come back, are let in and are done; then one of them holds up all others.

    Attributes:
        hung: names of those that do.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder, self.notes, self.now = random.Random(seed), folder, Notes(), 0.0
        size = self.draw.randint(2, 4)
        self.role = Role("worker", size, "none:none", ["cpu"] * size, apart=True)
        self.lives = 0
        self.at_work: dict[str, StartedProcess] = {}
        self.waiting: dict[str, StartedProcess] = {}
        first = [self.new(rank) for rank in range(size)]
        self.at_work = {str(member): member for member in first}
        self.left, self.hung, self.hangs = self.draw.randint(5, 30), set[str](), self.draw.random() < 0.8
        pulses = {str(member): pulse.of(folder, "worker", member.rank) for member in first}
        self.supervisor = Supervisor(first, [self.notes], self.wait, lambda: self.now, self.poll, self.again)
        self.detector = Hang(self.supervisor.at_work, pulses, LIMIT_S, lambda: self.now)

    def poll(self) -> dict[int, str]:
        self.detector.poll()
        return {}

    def new(self, rank: int, returns: bool = False) -> StartedProcess:
        self.lives += 1
        log = self.folder / f"workerlog.{rank}"
        log.write_text("")
        pulse.make(pulse.of(self.folder, "worker", rank))
        return StartedProcess(self.role, rank, Worker(log), self.lives, returns)

    def again(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        if self.draw.random() < 0.3:
            return None
        other = self.waiting[str(member)] = self.new(member.rank, returns=True)
        return other

    def works(self, member: StartedProcess) -> Worker:
        assert isinstance(member.handle, Worker)
        return member.handle

    def update(self, member: StartedProcess) -> None:
        handle = self.works(member)
        handle.updates += 1
        pulse.Pulse(str(pulse.of(self.folder, "worker", member.rank))).update(handle.updates)

    def wait(self, signs: list[object], seconds: float) -> None:
        """A second passes."""
        self.now += 1.0
        if self.hung:
            return
        for member in self.at_work.values():
            self.update(member)
        self.left -= 1
        what = self.draw.choice(("dies", "let in", "done", "", "", ""))
        who = self.draw.choice(list(self.at_work))
        if what == "dies" and len(self.at_work) > 1:
            handle = self.works(self.at_work.pop(who))
            handle.code, handle.after = -9, 0
        if what == "let in" and self.waiting:
            who, member = self.waiting.popitem()
            self.notes.set(f"fenced/worker/{member.rank}", "")
            self.notes.set(ADMITTED.format(member.rank, member.life), "0")
            self.at_work[who] = member
        if what == "done" and len(self.at_work) > 1:
            self.is_done(self.at_work.pop(who))
        if self.left <= 0:
            self.end()

    def is_done(self, member: StartedProcess) -> None:
        """Its process ends now, or is held by a thread of its own."""
        handle = self.works(member)
        handle.done, handle.value = True, member.rank
        if self.draw.random() < 0.5:
            handle.after = 0

    def end(self) -> None:
        if not self.hangs:
            for who in list(self.at_work):
                self.is_done(self.at_work.pop(who))
            for member in self.waiting.values():
                self.works(member).after, self.works(member).code = 0, -9
            self.waiting, self.hung = {}, {"nobody"}
            self.again = lambda member, death: None  # type: ignore[method-assign]
            self.supervisor.restart = self.again
            return
        self.hung = set(self.draw.sample(list(self.at_work), self.draw.randint(1, len(self.at_work))))
        most = max(self.works(member).updates for member in self.at_work.values())
        stopped = self.draw.random() < 0.5
        for who, member in self.at_work.items():
            handle = self.works(member)
            handle.stopped = stopped and who in self.hung
            handle.updates = handle.updates if stopped else most + (who not in self.hung)
            self.update(member)


@pytest.mark.parametrize("part", range(4))
def test_who_holds_up_the_others_is_named_whoever_else_is_dead_done_or_not_let_in(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_failure, "POLL_S", 0.0)
    seconds = iter(range(NEVER))
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: next(seconds) / 2, sleep=lambda seconds: None))
    for seed in range(75 * part, 75 * (part + 1)):
        history = History(seed, tmp_path)
        if not history.hangs:
            found = history.supervisor.watch()
            assert found.of["worker"] and all(value == rank for rank, value in found.of["worker"].items()), seed
            continue
        with pytest.raises(Died) as ended:
            history.supervisor.watch()
        assert set(ended.value.who.split(", ")) == history.hung, f"seed {seed}: {ended.value}"
        assert str(ended.value).startswith(ended.value.who) and "launch.hang_timeout_s" in str(ended.value)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_worker_that_hangs_when_all_others_have_done_their_work_is_killed_and_does_not_begin_the_run_again(
    apart: bool,
    ended: bool,
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It hangs after its goodbye. While another one works, or where none can be done without, it is named as before."""
    monkeypatch.setattr(first_failure, "POLL_S", 0.0)
    seconds, role = iter(range(NEVER)), Role("worker", 2, "none:none", ["cpu"] * 2, apart=apart)
    first, second = Worker(tmp_path / "0", value="result"), Worker(tmp_path / "1", stopped=True)
    first.done, first.after = ended, 3 if ended else NEVER
    members = [StartedProcess(role, 0, first, 7), StartedProcess(role, 1, second, 8)]
    for member in members:
        member.handle.log.write_text("")
    pulses = {str(member): pulse.make(pulse.of(tmp_path, "worker", member.rank)) for member in members}
    pulse.Pulse(str(pulses["worker 1"])).update(5)

    def poll() -> dict[int, str]:
        detector.poll()
        return {}

    watching = Supervisor(members, [Notes()], lambda signs, wait: None, lambda: 0.0, poll)
    detector = Hang(watching.at_work, pulses, LIMIT_S, lambda: next(seconds), unneeded=watching.unneeded)
    if not (apart and ended):
        with pytest.raises(Died, match="worker 1 does not even answer: it is stopped, after 5 updates"):
            watching.watch()
        return
    found = watching.watch()
    assert found.of["worker"] == {0: "result"} and found.lost[1].startswith("worker 1 was killed by SIGKILL")
    assert "worker 1 hangs, and all others have done their work: it is killed" in capsys.readouterr().out


class Host:
    """A launcher among several: its workers, its clock, and what it finds."""

    def __init__(self, number: int, ranks: range, role: Role, notes: Notes, folder: Path) -> None:
        self.now, self.who, self.folder = 100.0 * number, "", folder / str(number)
        self.folder.mkdir(parents=True)
        self.workers = [StartedProcess(role, rank, Worker(self.folder / f"workerlog.{rank}")) for rank in ranks]
        pulses = {str(m): pulse.make(pulse.of(self.folder, "worker", m.rank)) for m in self.workers}
        self.pulses = {m.rank: pulse.Pulse(str(pulses[str(m)])) for m in self.workers}
        for member in self.workers:
            member.handle.log.write_text("")
        elsewhere = SilentWorkers([notes], role.size, list(ranks), f"host {number}", role.apart)
        self.detector = Hang(lambda: self.workers, pulses, LIMIT_S, lambda: self.now, elsewhere)

    def poll(self, passed: float) -> None:
        """Look, some time after the last look."""
        self.now += passed
        try:
            if not self.who:
                self.detector.poll()
        except Died as death:
            self.who = f"{death.who}: {str(death).splitlines()[0]}"


def several(hosts: int, each: int, folder: Path, apart: bool = False) -> list[Host]:
    """So many hosts with so many workers each."""
    notes = Notes()
    role = Role("worker", hosts * each, "none:none", ["cpu"] * each, apart=apart)
    return [Host(n, range(n * each, (n + 1) * each), role, notes, folder) for n in range(hosts)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the stacks of a process that is stopped."""
    seconds = iter(range(NEVER))
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: next(seconds) / 2, sleep=lambda seconds: None))


@pytest.mark.parametrize("seed", range(40))
def test_on_several_hosts_all_name_the_worker_that_holds_up_the_others(seed: int, tmp_path: Path, quick: None) -> None:
    """Others wait for it for a while before: it does its share of a validation meanwhile."""
    draw = random.Random(seed)
    hosts = several(draw.randint(2, 3), draw.randint(1, 2), tmp_path)
    pulses = {rank: beat for host in hosts for rank, beat in host.pulses.items()}
    hung, stopped, late = draw.choice(list(pulses)), draw.random() < 0.5, draw.random() < 0.2
    for rank, beat in pulses.items():
        if not (late and rank == hung):  # one that has not even begun
            beat.update(4 if stopped or rank == hung else 5)
    [held] = [m.handle for host in hosts for m in host.workers if m.rank == hung]
    held.stopped = stopped
    for second in range(60):
        if second < 15 and not (stopped or late):
            pulses[hung].sign()
        for host in draw.sample(hosts, len(hosts)):
            host.poll(1.0)
            assert not host.who or second > LIMIT_S
    update = 0 if late else 4
    how = "does not even answer: it is stopped" if stopped else "hangs"
    home = next(number for number, host in enumerate(hosts) if hung in host.pulses)
    told = f"worker {hung} (host {home}) {how}, after {update} updates; no worker has done anything for 6 s"
    for host in hosts:
        assert host.who.startswith(f"worker {hung}: {told}"), f"{host.who}, and not {told}"


def test_a_host_whose_workers_wait_for_others_that_work_finds_no_hang(tmp_path: Path, quick: None) -> None:
    hosts = several(3, 1, tmp_path)
    hosts[1].pulses[1].sign()
    for second in range(50):
        if second < 30:
            hosts[0].pulses[0].sign()
        if second == 20:
            hosts[1].workers.clear()  # it has done its work
        for host in hosts:
            host.poll(1.0)
            assert not host.who or second > 29 + LIMIT_S
    assert (
        hosts[2].who.startswith("worker 2: worker 2 (host 2) hangs, after 0 updates") and hosts[0].who == hosts[2].who
    )


def test_a_worker_that_others_can_do_without_is_found_although_they_work(tmp_path: Path, quick: None) -> None:
    one, other = several(2, 1, tmp_path, apart=True)
    one.pulses[0].update(1)
    for _ in range(int(3 * LIMIT_S)):
        other.pulses[1].sign()
        one.poll(1.0)
        other.poll(1.0)
    assert one.who.startswith("worker 0: worker 0 (host 0) hangs, after 1 update;") and not other.who


def missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, who: tuple[str, ...], restarts: bool, apart: bool, **first: object
) -> RunFailed:
    """How three workers and a server end; worker 0 misses others, worker 1 is elsewhere, and worker 2 is ``first``."""
    monkeypatch.setattr(first_failure, "POLL_S", 0.0)
    monkeypatch.setattr(hang, "DUMP_S", 0.1)
    role = Role("worker", 3, "none:none", ["cpu"] * 3, apart=apart)
    telling = Failure.of(Missing("worker 1 did not arrive at a sum within 9 s", who))
    telling = Failure(**json.loads(json.dumps(asdict(telling))))  # as it comes through the pipe
    handles = [
        Worker(folder / "workerlog.0", after=2, code=1, failure=telling),
        Worker(folder / "workerlog.1", after=NEVER),
        Worker(folder / "workerlog.2", after=NEVER, **first),  # type: ignore[arg-type]
        Worker(folder / "serverlog.0", after=NEVER, stopped=True),
    ]
    members = [StartedProcess(role, rank, handle, rank + 1) for rank, handle in enumerate(handles[:3])]
    members.append(StartedProcess(Role("server", 1, "none:none", ["cpu"]), 0, handles[3], 9))
    pulses = {str(member): pulse.of(folder, member.role.name, member.rank) for member in members}
    for number, member in enumerate(members):
        member.handle.log.write_text("")
        pulse.make(pulses[str(member)])
        pulse.Pulse(str(pulses[str(member)])).update(10 + number)
    watching = Supervisor(members, [Notes()], lambda signs, wait: None)
    detector = Hang(watching.at_work, pulses, None)
    with pytest.raises(RunFailed) as ended, detector.found_by_others(watching.running, restarts):
        watching.watch()
    return ended.value


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("who", "dies", "how"),
    [
        (("worker 1",), "worker 1", "worker 1 hangs, after 11 updates"),
        (("worker 1", "worker 2"), "worker 1, worker 2", "worker 1, worker 2 hang, after 11 updates"),
        (("worker 1", "worker 3"), "worker 1", "worker 1 hangs, after 11 updates"),
        (("server 0",), "server 0", "server 0 does not even answer: it is stopped, after 13 updates"),
        (("worker 1", "server 0"), "server 0", "server 0 does not even answer: it is stopped, after 13 updates"),
    ],
)
def test_process_that_others_miss_counts_as_dead(
    who: tuple[str, ...], dies: str, how: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    death = missed(tmp_path, monkeypatch, who, True, apart)
    assert isinstance(death, Died) and death.who == dies
    told = f"{how}; worker 0: worker 1 did not arrive at a sum within 9 s"
    assert str(death).splitlines()[0] == told
    assert ('  worker 1: File "there.py"' in str(death)) == ("worker 1" in dies)


@pytest.mark.parametrize(
    ("who", "restarts", "first"),
    [
        (("worker 1",), False, {}),
        (("worker 1 (host 0)",), True, {}),
        (("worker 7",), True, {}),
        (("worker 1", "worker 2"), True, {"done": True}),
        (("worker 2",), True, {"failure": Failure(9**20, "later", True)}),
        ((), True, {}),
    ],
    ids=["no restarts", "of hosts", "nobody", "one has done its work", "one tells why", "no names"],
)
def test_error_of_who_misses_others_stays_where_they_cannot_be_taken_for_dead(
    who: tuple[str, ...], restarts: bool, first: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = missed(tmp_path, monkeypatch, who, restarts, False, **first)
    assert not isinstance(error, Died)
    assert str(error).startswith("worker 0: worker 1 did not arrive at a sum within 9 s\n  its log: ")


@pytest.mark.parametrize("apart", [True, False])
def test_process_that_has_done_its_work_and_does_not_end_is_killed_and_its_work_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    now = iter(range(NEVER))
    role = Role("worker", 2, "none:none", ["cpu"] * 2, apart=apart, restartable=True)
    stays = Worker(tmp_path / "1", value=2, done=True)
    members = [StartedProcess(role, 0, Scripted(tmp_path / "0", value=1), 7), StartedProcess(role, 1, stays, 8)]
    notes, deaths = Notes(), list[RunFailed]()
    watching = Supervisor(
        members,
        [notes],
        lambda signs, wait: None,
        lambda: float(next(now)),
        restart=lambda member, death: deaths.append(death),
    )
    found = watching.watch()
    assert found.of == {"worker": {0: 1, 1: 2}} and not found.lost and not deaths and not watching.ends_all
    assert stays.heard.count("SIGKILL") == 1
    assert f"worker 1 has done its work, and does not end within {STAY_S} s: it is killed" in capsys.readouterr().out
    assert ("done/worker/1" in notes) == apart
