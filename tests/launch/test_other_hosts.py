"""What launchers tell each other: why a run ends, who is lost, and that all are done."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.launch.test_supervisor import Notes
from trainer.errors import AskedToLeave, RunFailed
from trainer.launch.other_hosts import HEARD_S, POLL_S, OtherHosts
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.start import _leave_statistics
from trainer.launch.started_process import Role

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def others(notes: Notes, number: int, apart: bool = True, workers: int = 2) -> OtherHosts:
    """A launcher's view on host ``number`` of three, which looks each time it is asked to."""
    meeting = Rendezvous(number=number, hosts=3, addresses=ADDRESSES)
    role = Role("worker", 3 * workers, "none:none", ["cpu"] * workers, number * workers, apart)
    ticks = itertools.count()
    return OtherHosts([notes], meeting, [role], lambda: 2 * POLL_S * next(ticks))


def test_host_that_ends_the_run_tells_all_others_why_and_they_do_not_tell_it_as_their_own() -> None:
    notes = Notes()
    first, second, third = (others(notes, number) for number in range(3))
    assert third.poll() == {}
    second.end("server 1 was killed by SIGKILL\n  its log: somewhere")
    for host in (first, third):
        with pytest.raises(RunFailed, match=r"^host 1 \(10.0.0.2\) has ended the run: server 1 was killed by SIGKILL$"):
            host.poll()
        host.end("host 1 has ended the run")
    assert second.poll() == {} and notes["ended"].startswith("1 ")


def test_hosts_end_as_asked_to_leave_with_the_one_that_was() -> None:
    """A scheduler signals all of them, one after the other: none is to end as failed because another was told first."""
    notes = Notes()
    first, second = others(notes, 0), others(notes, 1)
    first.end("got SIGUSR1", asked=True)
    with pytest.raises(AskedToLeave, match=r"^host 0 \(10.0.0.1\) has ended the run: got SIGUSR1$") as left:
        second.poll()
    assert left.value.elsewhere


def test_host_0_ends_when_all_others_know_why_or_have_left_and_soon_if_they_do_not_hear() -> None:
    """The store in which they read it ends with host 0."""
    notes = Notes({"left/host/2": "{}"})
    first, second = others(notes, 0), others(notes, 1)
    began = first.clock()
    first.end("the disk is full")
    assert HEARD_S < first.clock() - began < 2 * HEARD_S
    with pytest.raises(RunFailed, match="the disk is full"):
        second.poll()
    first, began = others(notes, 0), 0.0
    first.end("the disk is full")
    assert first.clock() - began <= 3 * 2 * POLL_S, "at once"


def test_host_0_waits_for_all_to_know_what_another_host_has_told_but_for_none_that_is_lost_or_goes_without_a_word() -> (
    None
):
    """What host 1 says is read in host 0's store, too."""
    notes = Notes({"fenced/worker/4": "silent", "fenced/worker/5": "silent"})
    first, second = others(notes, 0), others(notes, 1)
    assert set(first.poll()) == {4, 5}, "host 2 is lost with all its workers"
    second.lose(["worker/2"], "its host has ended")
    began = first.clock()
    first.end("the disk is full")
    assert first.clock() - began <= 3 * 2 * POLL_S, "at once"
    notes = Notes()
    first, second = others(notes, 0), others(notes, 1)
    second.end("the disk is full")
    with pytest.raises(RunFailed, match="the disk is full"):
        first.poll()
    began = first.clock()
    first.end("host 1 has ended the run")
    assert first.clock() - began > HEARD_S, "host 2 has not looked yet"
    assert notes["ended"].startswith("1 ") and "knows/host/2" not in notes


def test_host_0_tells_each_lost_worker_of_other_hosts_once() -> None:
    notes = Notes({"fenced/worker/1": "its own", "fenced/worker/5": "nothing was heard of it for 8 s"})
    first = others(notes, 0)
    assert first.poll() == {5: "worker 5 on host 2 (10.0.0.3) is lost: nothing was heard of it for 8 s"}
    assert first.poll() == {} and others(notes, 1).poll() == {} and others(notes, 0, apart=False).poll() == {}


def test_host_0_waits_for_the_others_has_what_their_servers_returned_and_waits_for_no_lost_host() -> None:
    notes = Notes({"fenced/worker/4": "silent", "fenced/worker/5": "silent"})
    first, second = others(notes, 0), others(notes, 1)
    assert set(first.poll()) == {4, 5}
    second.leave({"worker": {2: {}}, "server": {1: {"version": 12}}})
    results = {"worker": {0: {}}, "server": {0: {"version": 12}}}
    first.leave(results)
    assert results["server"] == {0: {"version": 12}, 1: {"version": 12}}


@pytest.mark.all
def test_host_that_does_not_say_that_it_is_done_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    others(notes, 2).leave({})
    others(notes, 0).leave({})
    said = capsys.readouterr().out
    assert "host 1 (10.0.0.2) does not say that its processes have ended" in said and "host 2" not in said


def test_statistics_of_a_server_are_those_of_its_last_life(tmp_path: Path) -> None:
    """Its host has another folder, so that it cannot write them itself."""
    for pushes in (100, 900):
        _leave_statistics(tmp_path, {1: {"pushes": pushes}})
    assert json.loads((tmp_path / "server.1.json").read_text()) == {"pushes": 900}
