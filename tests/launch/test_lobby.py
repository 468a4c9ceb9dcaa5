"""The lobby in which hosts come and go, without processes: who is there, who is lost, how long is waited."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.pace import wait_for
from tests.store_elsewhere import stop, store_elsewhere
from trainer.errors import AskedToLeave, Died, RunFailed
from trainer.host.notes_board import SealedBoard
from trainer.host.patience import LONGEST_POLL_S
from trainer.host.patient_store import PatientStore
from trainer.host.signals import LEAVE, termination_raises
from trainer.job import elastic
from trainer.launch import lobby
from trainer.launch.lobby import BEAT, HERE, LOST_S, NEWEST, Guest, Host, Life, Lobby, RunOver
from trainer.planning.launcher import Assignment, Deaths, Supervision


class World:
    """A lobby whose time goes on when it sleeps; hosts beat while they are awake."""

    def __init__(self, most: int = 4) -> None:
        self.now = 0.0
        self.board = SealedBoard(dist.HashStore(), b"secret")
        self.awake: dict[int, Host] = {}
        self.at: dict[float, Callable[[], None]] = {}
        self.lobby = Lobby(self.board, most, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()
        for host in self.awake.values():
            self.board.set(BEAT.format(host.id), str(self.now))

    def tell(self, number: int, **what: object) -> None:
        self.awake[number] = replace(self.awake.get(number, Host(f"first {number}")), **what)  # type: ignore[arg-type]
        id = self.awake[number].id
        self.board.set(HERE.format(id), json.dumps(asdict(self.awake[number])))
        self.board.set(BEAT.format(id), str(self.now))
        self.board.set(NEWEST.format(number), id)

    def live(self, *numbers: int) -> None:
        """Begin a life with these hosts."""
        for number in numbers:
            self.tell(number)
        self.lobby.poll()
        self.lobby.begin([0, *numbers], 1, "")


def test_waits_for_more_than_the_least_and_not_when_all_are_there() -> None:
    world = World()
    world.at = {5.0: lambda: world.tell(2), 20.0: lambda: world.tell(1)}
    assert world.lobby.gather(2, 300, 30) == [0, 1, 2] and world.now == pytest.approx(35, abs=0.5)
    world = World()
    world.at = {5.0: lambda: world.tell(2), 20.0: lambda: world.tell(1), 21.0: lambda: world.tell(3)}
    assert world.lobby.gather(2, 300, 30) == [0, 1, 2, 3] and world.now == pytest.approx(21, abs=0.5)


def test_too_few_are_waited_for_so_long() -> None:
    world = World()
    world.at = {5.0: lambda: world.tell(2)}
    with pytest.raises(RunFailed, match=r"2 hosts are there, and launch\.nnodes=3:4 needs 3: no more came within 60 s"):
        world.lobby.gather(3, 60, 30)
    assert world.now == pytest.approx(60, abs=0.5)


def test_host_that_goes_while_others_are_waited_for_does_not_count() -> None:
    world = World()
    world.at = {1.0: lambda: world.tell(2), 5.0: lambda: world.tell(2, gone=True), 8.0: lambda: world.tell(1)}
    assert world.lobby.gather(2, 300, 10) == [0, 1] and world.now == pytest.approx(18, abs=0.5)


def test_silent_host_is_lost_and_time_in_which_host_0_was_stopped_is_nobodys_silence() -> None:
    world, run = World(), SealedBoard(dist.HashStore(), b"run")
    world.live(1, 2)
    world.now += 100 * LOST_S
    world.lobby.watch(run)
    assert LONGEST_POLL_S < LOST_S
    silent = world.awake.pop(2)
    with pytest.raises(Died, match="host 2 is lost") as lost:
        for _ in range(100):
            world.sleep(0.5)
            world.lobby.watch(run)
    assert lost.value.who == "host 2 in life 1" and not run.check([LEAVE])
    world.awake[2] = silent
    world.sleep(1)
    world.lobby.poll()
    assert world.lobby.lost() == [], "it was not killed, but stopped, and is there again"


@pytest.mark.parametrize("timeout_s", [1.0, LOST_S - 1, 10 * LOST_S])
def test_host_that_has_died_is_known_to_be_lost_when_the_life_has_settled(timeout_s: float) -> None:
    world = World()
    world.live(1, 2)
    world.tell(2, ended=1)
    world.awake.pop(1)
    assert [host.ended for host in world.lobby.settle(timeout_s)] == [1] and world.lobby.lost() == [1]


def test_host_that_is_lost_twice_is_no_process_that_dies_twice_after_the_same_update() -> None:
    world, deaths = World(), Deaths(3, lambda: 0.0)
    for life in (1, 2):
        world.live(1)
        assert deaths.restart(world.lobby.death_of([1])) == f"restart {life} of 3"


def test_host_that_has_left_has_not_died_and_one_started_again_has() -> None:
    world, run = World(), SealedBoard(dist.HashStore(), b"run")
    world.live(1)
    world.tell(1, gone=True)
    with pytest.raises(RunFailed, match="host 1 left") as left:
        world.lobby.watch(run)
    assert not isinstance(left.value, Died)
    world = World()
    world.live(1)
    world.tell(1, id="second 1")
    with pytest.raises(Died, match="host 1 is lost"):
        world.lobby.watch(run)
    assert world.lobby.waiting() == [1]


def test_who_comes_in_is_let_in_after_one_checkpoint_and_not_before_the_hosts_have_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Run(SealedBoard):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            assert "came in" not in capsys.readouterr().out, "what is told is true: the workers have been asked"

    world, run = World(), Run(dist.HashStore(), b"run")
    world.live(1)
    world.tell(3)
    world.lobby.watch(None)
    assert not world.lobby.resized
    world.lobby.watch(run)
    assert world.lobby.resized and run.check([LEAVE])
    assert "host 3 came in: all save a checkpoint, and go on together" in capsys.readouterr().out
    world.tell(1, ended=1, how="preempted")
    assert [host.how for host in world.lobby.settle(60)] == ["preempted"]
    assert world.lobby.gather(1, 60, 0) == [0, 1, 3]


def test_host_that_ends_its_part_of_a_life_and_goes_is_not_lost() -> None:
    """It may be done a while before host 0, whose worker writes the model."""
    world, run = World(), SealedBoard(dist.HashStore(), b"run")
    world.live(1)
    world.tell(1, ended=1, how="done", gone=True)
    world.lobby.watch(run)
    assert world.lobby.lost() == []


def test_host_that_leaves_and_comes_back_before_the_others_have_ended_the_life_is_not_lost() -> None:
    world, run = World(), SealedBoard(dist.HashStore(), b"run")
    world.live(1)
    world.tell(1, ended=1, how="preempted", asked="SIGTERM", gone=True)
    world.tell(1, id="second 1", ended=0, how="", asked="", gone=False)
    world.lobby.watch(run)
    assert world.lobby.lost() == [] and world.lobby.resized
    assert [host.asked for host in world.lobby.settle(60)] == ["SIGTERM"]
    assert world.lobby.gather(1, 60, 0) == [0, 1]
    world = World()
    world.live(1)
    world.tell(1, gone=True)
    world.tell(1, id="second 1", gone=False)
    with pytest.raises(RunFailed, match="host 1 left") as left:
        world.lobby.watch(run)
    assert not isinstance(left.value, Died)


def test_host_that_leaves_takes_no_part_in_the_next_life() -> None:
    world = World()
    world.live(1, 2)
    world.tell(1, ended=1, how="preempted", asked="SIGTERM")
    world.tell(2, ended=1, how="preempted")
    world.lobby.settle(60)
    assert world.lobby.gather(1, 60, 0) == [0, 2]


def test_guest_hears_of_its_lives_and_of_the_end() -> None:
    world = World()
    guest = Guest(world.board, 1, "10.0.0.1:29500", 4, world.sleep)
    guest.tell()
    world.board.set(BEAT.format(guest.host.id), "0")
    world.board.set(NEWEST.format(1), guest.host.id)
    world.lobby.poll()
    world.lobby.begin([0, 1], 4321, "step-000000004")
    life = guest.next_life(0)
    assert isinstance(life, Life)
    assert life == Life(1, 2, 1, "hosts 0 and 1", 4321, "step-000000004")
    world.at = {
        3.0: lambda: (world.lobby.begin([0], 1, ""), None)[1],
        6.0: lambda: world.board.set("over", json.dumps(["failed", "it broke"])),
    }
    assert guest.next_life(1) == RunOver("failed", "it broke"), "the second life was without it"


def test_host_that_comes_while_the_run_ends_hears_that_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 removes its mark in the shared folder last."""
    world = World()
    world.board.set(lobby.MARK, ".hosts-of-a-run-that-is-done")
    world.at = {1.0: lambda: world.board.set("over", json.dumps(["done", ""]))}
    guest = Guest(world.board, 1, "10.0.0.1:29500", 4, world.sleep)
    guest._check_folder(tmp_path)
    assert guest.next_life(0) == RunOver("done", "")

    told = SimpleNamespace(config=SimpleNamespace(launch=None))
    ready = SimpleNamespace(
        plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(tmp_path)), topology=SimpleNamespace(nnodes=2)),
        checked=told,
    )
    monkeypatch.setattr(elastic, "open_lobby", lambda launch: world.board)
    monkeypatch.setattr(elastic, "_terms", lambda ready: {})
    seen: list[str] = []

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # what is done is not preempted by it
        seen.extend(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(Lobby, "end", end)
    with termination_raises(lambda: True), elastic._lobby(ready):  # type: ignore[arg-type]
        pass
    assert seen == [world.board.get(lobby.MARK).decode()] and not list(tmp_path.iterdir())


def test_host_goes_on_with_its_signs_of_life_when_host_0_was_stopped_for_long_and_its_goodbye_waits_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby, "BEAT_S", 0.05)
    monkeypatch.setattr(lobby, "LEAVE_S", 0.2)
    (tmp_path / "mark").touch()
    with store_elsewhere() as (store, serves):
        board, patience = SealedBoard(PatientStore(store, "the store", 1000), b"secret"), 0.2
        board.set("terms", "{}")
        board.set("mark", "mark")
        guest = Guest(board, 1, "there", 4)
        patient = SealedBoard(PatientStore(store.clone(), "the store", patience), b"secret")
        monkeypatch.setattr(board, "clone", lambda: patient)
        guest.come(tmp_path, {})

        def beat() -> int:
            return int(board.get(BEAT.format(guest.host.id)))

        first = beat()
        wait_for(lambda: beat() > first, 20, "it beats")
        stop(serves)
        time.sleep(3 * patience)
        serves.send_signal(signal.SIGCONT)
        first = beat()
        wait_for(lambda: beat() > first + 3, 20, "it beats again")
        stop(serves)
        time.sleep(3 * patience)  # a sign of life is given up
        patient.store.patience_s = 1000
        time.sleep(2 * patience)  # the next one is under way
        guest.note(ended=1, how="done")
        guest.leave()  # both return
        serves.send_signal(signal.SIGCONT)
        wait_for(
            lambda: json.loads(board.get(HERE.format(guest.host.id)))["gone"], 20, "and is heard, if host 0 goes on"
        )
        assert json.loads(board.get(HERE.format(guest.host.id)))["how"] == "done"


def test_host_whose_part_of_a_life_is_done_has_not_come_in() -> None:
    """It waits until the others have done theirs, or is on its way out; one whose part has failed is let in again."""
    for how, comes in (("done", False), ("preempted", False), ("died", True), ("failed", True)):
        world, run = World(), SealedBoard(dist.HashStore(), b"run")
        world.live(1)
        world.tell(1, ended=1, how=how)
        world.lobby.watch(run)
        assert world.lobby.resized == run.check([LEAVE]) == comes, how
        assert world.lobby.waiting() == [1], "for the next life it is there"


def come_to(world: World, folder: Path) -> None:
    """What host 0 writes before the others come."""
    (folder / "mark").touch()
    world.board.set("terms", json.dumps({"seed": 0}))
    world.board.set("mark", "mark")


def test_host_that_connects_slowly_for_its_signs_of_life_is_not_lost(tmp_path: Path) -> None:
    world = World()

    class Slow(SealedBoard):
        """Host 0 goes on, with the hosts that are there, while this host waits for its second connection."""

        def clone(self) -> SealedBoard:
            world.lobby.begin(world.lobby.gather(1, 60, 0), 1, "")
            for _ in range(10):
                world.sleep(LOST_S / 5)
                world.lobby.watch(None)  # raises if a host of the life is lost
            return SealedBoard(self.store, b"secret")

    come_to(world, tmp_path)
    guest = Guest(Slow(world.board.store, b"secret"), 1, "there", 4)
    guest.come(tmp_path, {"seed": 0})
    world.lobby.poll()
    assert world.lobby.life.hosts == 1 and world.lobby.waiting() == [1], "it came after the life had begun"
    guest.leave()


def test_line_of_a_life_names_few_hosts_one_by_one_and_many_by_ranges() -> None:
    few, some, holes = [0, 2, 3], [*range(500), 501, *range(600, 1000)], [*range(0, 2000, 2)]
    assert [lobby.names_of(hosts) for hosts in ([0], few)] == ["host 0", "hosts 0, 2 and 3"]
    assert lobby.names_of(some) == "hosts 0-499, 501 and 600-999" and lobby.names_of([*range(99)]) == "hosts 0-98"
    assert lobby.names_of(holes).startswith("hosts 0, 2, 4, ") and lobby.names_of(holes).endswith(", 30 and 984 more")


def test_host_that_was_stopped_while_it_came_does_not_replace_the_one_that_has_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    come_to(world, tmp_path)
    stopped, other = Guest(world.board, 1, "there", 4), Guest(world.board, 1, "there", 4)
    monkeypatch.setattr(stopped, "_check_alone", lambda: other.come(tmp_path, {"seed": 0}))
    with pytest.raises(RunFailed, match="there is another host 1 already"):
        stopped.come(tmp_path, {"seed": 0})
    world.lobby.poll()
    assert world.lobby.hosts[1].id == other.host.id and not other.replaced
    other.leave()


def test_host_with_another_secret_or_another_command_is_refused_and_nobody_hears_of_it(tmp_path: Path) -> None:
    world = World()
    come_to(world, tmp_path)
    with pytest.raises(RunFailed, match="host 0 knows another secret than this host"):
        Guest(SealedBoard(world.board.store, b"another"), 1, "there", 4).come(tmp_path, {"seed": 0})
    with pytest.raises(RunFailed, match=r"another command: seed is 7 here and 0 on host 0.*The run goes on without"):
        Guest(world.board, 1, "there", 4).come(tmp_path, {"seed": 7})
    world.lobby.poll()
    assert not world.lobby.hosts


def a_life(told: Path, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A job whose lives need no plan."""
    monkeypatch.setattr(guest, "next_life", lambda after: lobby.Life(after + 1, 2, 1, "hosts 0 and 1", 1, ""))
    monkeypatch.setattr(elastic, "_planned_for", lambda ready, life: ready)
    monkeypatch.setattr(elastic, "_described", lambda *_: "")
    assignment = Assignment(None, None)  # type: ignore[arg-type]
    return SimpleNamespace(plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(told))), assignment=assignment)


def test_host_that_was_asked_to_leave_before_its_life_failed_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host was stopped, so that nobody could save."""
    guest = Guest(World().board, 1, "there", 4)
    failed = RunFailed("host 0 has ended the run: host 2 is lost")
    failed.asked = "SIGTERM"

    def start(assignment: Assignment, supervision: Supervision) -> dict[str, object]:
        assert not guest.host.ended or guest.host.asked, "it is no part of another life"
        raise failed

    ready = a_life(tmp_path, guest, monkeypatch)
    with pytest.raises(AskedToLeave, match="got SIGTERM"):
        elastic._follow(start, ready, guest)  # type: ignore[arg-type]
    assert (guest.host.ended, guest.host.asked) == (1, "SIGTERM")
    monkeypatch.setattr(elastic.store, "newest_whole", lambda folder, verify: folder)
    monkeypatch.setattr(elastic.store, "about", lambda folder: SimpleNamespace(done=6))
    assert elastic._follow(start, ready, guest) == {"ended": "preempted", "steps": 6}  # type: ignore[arg-type]


def test_host_goes_on_without_one_that_was_asked_to_leave_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, lives = Guest(World().board, 1, "there", 4), []

    def start(assignment: Assignment, supervision: Supervision) -> dict[str, object]:
        lives.append(guest.host.how)
        raise AskedToLeave("got SIGTERM", elsewhere=len(lives) == 1)

    with pytest.raises(AskedToLeave):  # in the second life this host itself
        elastic._follow(start, a_life(tmp_path, guest, monkeypatch), guest)  # type: ignore[arg-type]
    assert lives == ["", "failed"]


def test_host_that_another_one_has_replaced_is_not_heard_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped until it was missed, and wakes."""
    monkeypatch.setattr(lobby, "BEAT_S", 0.05)
    world = World()
    come_to(world, tmp_path)
    stopped, newest = Guest(world.board, 1, "there", 4), Guest(world.board, 1, "there", 4)
    stopped.come(tmp_path, {"seed": 0})
    monkeypatch.setattr(newest, "_check_alone", lambda: None)  # the other one is silent
    newest.come(tmp_path, {"seed": 0})
    wait_for(lambda: stopped.replaced, 20, "it looks")
    stopped.tell()  # as it does when it is stopped just before
    world.lobby.poll()
    assert world.lobby.hosts[1].id == newest.host.id and world.lobby.waiting() == [1]
    with pytest.raises(RunFailed, match="another host 1 has come in its place"):
        stopped.next_life(0)
    stopped.leave()
    assert not world.lobby.hosts[1].gone
    newest.leave()
    world.lobby.poll()
    assert world.lobby.hosts[1].gone
