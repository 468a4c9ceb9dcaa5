"""Detects that no worker makes progress any more, and names the worker that holds the others up and where it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.errors import Died
from trainer.host import pulse
from trainer.host.pulse import Beat
from trainer.launch.supervisor import StartedProcess
from trainer.wording import counted

LOOK_S = 0.5
LONGEST_LOOK_S = 5.0
"""So much time at most counts between two looks: this process may have been stopped, and the workers with it."""
DUMP_S = 2.0
"""Longest wait for the stacks of a process; one that is stopped writes none."""
FRAMES = 8


class Hang:
    """Watches the workers' pulses for the launcher, and raises when no worker makes progress.

    Args:
        members: the processes that are watched.
        pulses: their files, by name.
        limit_s: longest time without a sign of life of any of them, once there was one; None: not looked at.
    """

    def __init__(
        self, members: Sequence[StartedProcess], pulses: Mapping[str, Path], limit_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.members, self.pulses, self.limit_s, self.clock = members, pulses, limit_s, clock
        self.looked, self.silent = clock(), 0.0
        self.seen: list[Beat] = []

    def look(self) -> None:
        """Check the pulses; call it again and again.

        Raises:
            Died: nothing has happened for too long.
        """
        now = self.clock()
        if self.limit_s is None or now - self.looked < min(LOOK_S, self.limit_s / 4):
            return
        passed, self.looked = now - self.looked, now
        beats = [pulse.look(self.pulses[str(member)]) for member in self.members]
        idle = beats == self.seen and any(beat.total for beat in beats)
        self.silent = self.silent + min(passed, LONGEST_LOOK_S) if idle else 0.0
        self.seen = beats
        if self.silent > self.limit_s:
            raise self._found(beats)

    def _found(self, beats: Sequence[Beat]) -> Died:
        names = [str(member) for member in self.members]
        stacks = _stacks_of(self.members)
        stopped = [name for name in names if stacks.get(name) == []]
        least = min(beat[:2] for beat in beats)
        late = [name for name, beat in zip(names, beats, strict=True) if beat[:2] == least]
        behind = stopped or late
        update = min(beat.update for name, beat in zip(names, beats, strict=True) if name in behind)
        how = "does not even answer: it is stopped" if stopped else "hangs"
        if len(behind) > 1:
            how = "do not even answer: they are stopped" if stopped else "hang"
        who, logs = ", ".join(behind), self.members[0].handle.log.parent
        lines = [f"{who} {how}, after {counted(update, 'update')}; no worker has done anything for {self.limit_s:g} s (launch.hang_timeout_s)"]  # fmt: skip
        lines += [f"  {name}: {line}" for name in behind for line in stacks.get(name, [])]
        return Died("\n".join([*lines, f"  the Python stacks of all workers are in their logs, {logs}/workerlog.N"]), who, update)  # fmt: skip


def _stacks_of(members: Sequence[StartedProcess]) -> dict[str, list[str]]:
    """Have processes write their Python stacks to their logs; returns each main thread's frames, [] if not written."""
    sizes = {str(member): member.handle.log.stat().st_size for member in members}
    asked = [member for member in members if member.handle.dump()]
    until = time.monotonic() + DUMP_S
    found: dict[str, list[str]] = {str(member): [] for member in asked}
    while time.monotonic() < until and not all(found.values()):
        time.sleep(0.05)
        found = {str(member): _frames(member.handle.log, sizes[str(member)]) for member in asked}
    return found


def _frames(log: Path, since: int) -> list[str]:
    """The innermost calls of the thread that a signal came to."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    return [line.strip() for line in lines[starts[-1] + 1 :] if line.startswith("  File")][:FRAMES] if starts else []
