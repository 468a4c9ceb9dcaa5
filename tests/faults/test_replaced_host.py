"""launch.nnodes=MIN:MAX: a host that was stopped for long wakes when another one has come in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.loopback import loopback
from tests.pace import wait_for
from tests.runs import family

AT, LATER = 7, 14
LONG = 180
GATES = ",".join(f"{{_target_:tests.faults.gate.Gate,at:{at},until:go{at}}}" for at in (AT, LATER))


@pytest.mark.long
def test_host_that_was_stopped_and_has_been_replaced_is_no_part_of_the_run(tmp_path: Path) -> None:
    """As a virtual machine that was suspended: the scheduler has started another one under its number."""
    with loopback(
        tmp_path, "launch.join_s=600", "checkpoint.every_steps=2", "launch.nnodes=1:2", f"callbacks=[{GATES}]"
    ) as hosts:
        first, stopped = hosts.start(0), hosts.start(1)
        wait_for(lambda: hosts.at_the_gate(AT), LONG, "the workers wait")
        asleep = family(stopped.pid)
        for process in asleep:
            process.suspend()
        hosts.go(f"{AT}")
        wait_for(lambda: "life 2: host 0, " in hosts.screen(0), LONG, "host 1 is lost")
        wait_for(lambda: hosts.at_the_gate(LATER), LONG, "host 0 goes on")
        told = hosts.screens[1]
        second = hosts.start(1)
        wait_for(lambda: "host 1 came in" in hosts.screen(0), LONG, "another host 1 comes")
        for process in asleep:
            process.resume()
        hosts.go(f"{LATER}")
        assert [first.wait(LONG), second.wait(LONG)] == [0, 0], hosts.all_screens() + told.read_text()
        assert stopped.wait(LONG) == 1 and "another host 1 has come in its place" in told.read_text()
        assert "is lost" not in hosts.screen(0).partition("host 1 came in")[2], hosts.screen(0)
