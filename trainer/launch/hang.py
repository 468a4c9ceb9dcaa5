"""Finds hanging processes, and names them with their Python stacks.

A process hangs if no worker makes progress any more, or if others have missed it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import Died, Missing, first_line
from trainer.host import pulse
from trainer.host.patience import LONGEST_POLL_S
from trainer.host.pulse import Beat
from trainer.launch.silent_workers import Silent, SilentWorkers
from trainer.launch.started_process import StartedProcess
from trainer.wording import counted

POLL_S = 0.5
DUMP_S = 5.0
"""Longest wait for the stack of a process; a stopped process writes none."""
FRAMES = 8


class Hang:
    """Watches the workers' pulses for the launcher, and raises when no worker makes progress.

    Args:
        at_work: returns the processes that should make progress now.
        pulses: pulse files of the processes, by name.
        limit_s: longest time without a sign of life of any of them, after the first one; None: no limit.
        elsewhere: the launchers' notes about silent workers; None: there is one host.
        unneeded: returns whether all other workers have finished, so that the run does not need these.
    """

    def __init__(
        self,
        at_work: Callable[[], Sequence[StartedProcess]],
        pulses: Mapping[str, Path],
        limit_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        elsewhere: SilentWorkers | None = None,
        unneeded: Callable[[Sequence[StartedProcess]], bool] = lambda members: False,
    ) -> None:
        self.at_work, self.pulses, self.limit_s, self.clock = at_work, pulses, limit_s, clock
        self.elsewhere, self.unneeded = elsewhere, unneeded
        self.polled, self.silent, self.begun = clock(), 0.0, False
        self.seen: dict[str, Beat] = {}
        self.found: dict[int, Silent] = {}
        """This host's report about its silent workers."""

    def poll(self) -> None:
        """Check the pulses. Call it often.

        Raises:
            Died: no worker has made progress for too long.
        """
        now = self.clock()
        if self.limit_s is None or now - self.polled < min(POLL_S, self.limit_s / 4):
            return
        passed, self.polled = now - self.polled, now
        members = self.at_work()
        beats = {str(member): pulse.read(self.pulses[str(member)]) for member in members}
        others_wait = self.elsewhere is not None and self.elsewhere.anybody()
        self.begun = self.begun or others_wait or any(beat.total for beat in beats.values())
        idle = self.begun and bool(beats) and beats == self.seen
        self.silent = self.silent + min(passed, LONGEST_POLL_S) if idle else 0.0
        self.seen = beats
        if self.silent > self.limit_s:
            self._silent(members, beats)
        elif self.elsewhere is not None:
            self.found = {}
            self.elsewhere.withdraw() if members else self.elsewhere.tell({})

    def _silent(self, members: Sequence[StartedProcess], beats: Mapping[str, Beat]) -> None:
        """Report this host's workers as silent.

        Raises:
            Died: all workers of the run are silent, or the others can go on without these.
        """
        assert self.limit_s is not None
        if self.elsewhere is None and self.unneeded(members):
            for member in members:
                print(f"\n{member} hangs, and all others have done their work: it is killed\n", flush=True)
                member.handle.signal(signal.SIGKILL)
            return
        everybody = self.found = self.found or self._looked_at(members, beats)
        if self.elsewhere is not None:
            self.elsewhere.tell(self.found)
            all_silent = self.elsewhere.everybody()
            if all_silent is None and self.silent <= self.limit_s + self.elsewhere.patience_s(self.limit_s):
                return
            everybody = all_silent or self.found
        silent = {f"worker {rank}": one for rank, one in everybody.items()}
        least = min((one.update, one.since) for one in silent.values())
        behind = [name for name, one in silent.items() if (one.update, one.since) == least]
        why = f"no worker has done anything for {self.limit_s:g} s (launch.hang_timeout_s)"
        raise _death(silent, list(silent), behind, why, members[0].handle.log.parent)

    def _looked_at(self, members: Sequence[StartedProcess], beats: Mapping[str, Beat]) -> dict[int, Silent]:
        host = self.elsewhere.host if self.elsewhere is not None else ""
        found = _silent_ones(members, beats, host)
        return {member.rank: found[str(member)] for member in members}

    @contextmanager
    def found_by_others(self, running: Sequence[StartedProcess], restarts: bool) -> Iterator[None]:
        """Context manager: running processes that others have missed (:class:`Missing`) count as dead.

        If one of the missed processes does not run here, the error of the process that missed it is raised as it is.

        Args:
            running: the processes that have not ended.
            restarts: all processes can be restarted together.

        Raises:
            Died: others have missed running processes.
        """
        try:
            yield
        except Missing as error:
            silent = [m for m in running if m.handle.failure is None and not m.handle.returned]
            who = [name for name in error.who if name in map(str, running)]
            if not (restarts and who and {*who} <= {str(m) for m in silent}):
                raise
            beats = {str(member): pulse.read(self.pulses[str(member)]) for member in silent}
            found = _silent_ones(silent, beats)
            raise _death(found, who, who, first_line(error), silent[0].handle.log.parent) from error


def _silent_ones(members: Sequence[StartedProcess], beats: Mapping[str, Beat], host: str = "") -> dict[str, Silent]:
    """Collect pulse and stack of silent processes, by name. Each writes its stack into its log."""
    stacks = _stacks_of(members)
    return {name: Silent(beats[name].update, beats[name].since, stacks.get(name), host) for name in map(str, members)}


def _death(silent: Mapping[str, Silent], suspects: Sequence[str], behind: Sequence[str], why: str, logs: Path) -> Died:
    """The death of processes that hang, with the innermost calls of each.

    Args:
        suspects: those that count as hanging if they are stopped (they wrote no stack).
        behind: those that count as hanging if no suspect is stopped.
        why: how the hang was noticed. logs: folder of this host's logs.
    """
    stopped = [name for name in suspects if silent[name].stack == []]
    behind = stopped or behind
    update = min(silent[name].update for name in behind)
    how = "does not even answer: it is stopped" if stopped else "hangs"
    if len(behind) > 1:
        how = "do not even answer: they are stopped" if stopped else "hang"
    named = ", ".join(f"{name} ({silent[name].host})" if silent[name].host else name for name in behind)
    lines = [f"{named} {how}, after {counted(update, 'update')}; {why}"]
    lines += [f"  {name}: {line}" for name in behind for line in silent[name].stack or ()]
    on_its_host = ", each on its host" if any(one.host for one in silent.values()) else ""
    last = f"  the Python stacks of all that run are in their logs, in {logs}{on_its_host}"
    return Died("\n".join([*lines, last]), ", ".join(behind), update)


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
    """The innermost calls of the thread that got the signal."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    return [line.strip() for line in lines[starts[-1] + 1 :] if line.startswith("  File")][:FRAMES] if starts else []
