"""Who is started again: after the one before is dead for certain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.launch.test_supervisor import Scripted
from trainer.errors import Died
from trainer.host import pulse
from trainer.launch.engine import Start
from trainer.launch.returns import Returns
from trainer.launch.supervisor import Role, StartedProcess


def test_process_whose_forkserver_was_killed_is_ended_before_another_begins(tmp_path: Path) -> None:
    """Its exit code is made up, and it goes on meanwhile: its updates are counted when it is dead."""
    seems_dead, beat = Scripted(tmp_path / "0", code=255), pulse.make(tmp_path / "pulse")
    heard: list[str] = []

    def ends(number: int) -> None:
        heard.append("ended")
        pulse.Pulse(str(beat)).update(9)

    seems_dead.signal = ends  # type: ignore[method-assign, assignment]
    role = Role("worker", 1, "none:none", ["cpu"], apart=True, again=True)
    told = Start(role, 0, SimpleNamespace(resume=""), None, "", 0, "", {}, tmp_path / "0", tmp_path, str(beat))  # type: ignore[arg-type]
    member = StartedProcess(role, 0, seems_dead, 1)

    def begin(start: object) -> Scripted:
        heard.append("begun")
        return Scripted(tmp_path / "1")

    returns = Returns(3, {"worker 0": told}, begin, [member])
    assert returns.again(member, Died("worker 0 ended with exit code 255", "worker 0")) is not None
    assert heard == ["ended", "begun"] and returns.deaths == [("worker 0", 9)]
