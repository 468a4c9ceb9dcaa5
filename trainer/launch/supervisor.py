"""Watches the started processes of this host to their end, and names the failure that ended the run.

States of a process, as the supervisor sees them:

    running    it is in ``running``; its handle has no exit code
    returned   it has sent its result and waits; it ends when :meth:`Supervisor._dismiss` lets it
    lingering  it has sent a failure and does not end within ``LINGER_S``: it gets SIGKILL, and its own words count
    silent     the servers report that this worker does nothing: it gets SIGKILL, and the servers' reason counts
    well       it has ended after it returned; its result is in ``results``
    dead       it has ended otherwise; it is replaced (``restart``), or done without (``lost``), or it ends the run

Who moves them: the process itself (result, failure, exit), the servers by notes on the board (``SILENT``, ``fenced``,
``ADMITTED``), and the launchers of other hosts through ``poll``. Only :meth:`Supervisor.watch` changes the lists.

What always holds: each started process is in ``members`` until another replaces it or the run goes on without it, so
that ``launch`` can end all of them. A process that others may wait for is dismissed only when all of its role have
returned. A worker's death is on the board (``lost/...``, ``fenced/...``) before its replacement starts.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.errors import Died, RunFailed
from trainer.host.notes_board import Board, NoNote
from trainer.host.signals import LEAVE
from trainer.launch.first_failure import POLL_S, failed_first
from trainer.launch.started_process import Handle, StartedProcess
from trainer.strategies.lost_workers import ADMITTED, SILENT, note_of

LINGER_S = 5
"""Longest time from a process's failure to its end."""
STAY_S = 30
"""Longest time from a process's dismissal to its end: a thread of the user's may still send something."""
SERVERS_EVERY_S = 0.5
"""Time between two readings of the servers' notes about silent workers."""
END_S = 3
"""Longest wait for the end of killed processes."""


@dataclass(frozen=True)
class Death:
    """The death of a worker. ``of``: the dead process; ``life``: of the process that replaces it, 0 if none does."""

    of: StartedProcess
    error: RunFailed
    life: int


@dataclass(frozen=True)
class HostResults:
    """How the processes of this host ended, and what they returned.

    Attributes:
        of: by role and rank, what an entry returned.
        lost: by rank, why workers died that the others did without.
        asked: the signal that has asked this host to leave; empty: none has.
    """

    of: dict[str, dict[int, Any]]
    lost: dict[int, str]
    asked: str = ""


class Supervisor:
    """Watches processes until all have ended, or until one fails that the others cannot do without.

    Args:
        members: the started processes of this host.
        board: notes about lost processes; in a list, because the frames of an error would keep the board open.
        wait: waits until one of these objects is ready, or for so many seconds.
        clock: monotonic seconds.
        poll: called in each round; returns the lost processes of other hosts (rank -> reason), and raises if another
            host has ended the run.
        restart: starts a process that replaces a dead one, and returns it; None: the dead one is not replaced.
    """

    def __init__(
        self,
        members: Sequence[StartedProcess],
        board: Sequence[Board],
        wait: Callable[[list[Any], float], object],
        clock: Callable[[], float] = time.monotonic,
        poll: Callable[[], Mapping[int, str]] = dict,
        restart: Callable[[StartedProcess, RunFailed], StartedProcess | None] = lambda member, death: None,
    ) -> None:
        self.board, self.wait, self.clock = board, wait, clock
        self.poll, self.restart = poll, restart
        self.members, self.running = list(members), list(members)
        """``members``: the processes that the run needs; ``running``: those of them that have not ended."""
        self.results: dict[str, dict[int, Any]] = {member.role.name: {} for member in members}
        self.lost: dict[int, str] = {}
        self.deaths: list[Death] = []
        """Deaths of workers that the run went on without, the latest last."""
        self._unneeded_since: float | None = None
        self._dismissed: dict[str, float] = {}
        """When each returned process was dismissed."""
        self._stayed = set[str]()
        """Dismissed processes that were killed because they did not end."""
        self._polled = clock()
        self._silent: dict[str, str] = {}
        """Workers that the servers reported as silent, with the servers' reason."""

    def watch(self) -> HostResults:
        """Watch the processes to their end; returns their results, and the reasons of lost ones.

        Raises:
            RunFailed: a process failed that the others cannot do without; the message names it, its own error and its
                log.
        """
        while self.running:
            for member in list(self.running):
                member.handle.poll()
                if member.handle.exitcode is not None:
                    self._ended(member)
            for member in filter(_lingers, self.running):
                if not self._can_do_without(member):
                    raise self._cause(member)
                member.handle.signal(signal.SIGKILL)  # the reported failure counts, not the signal
            self._end_dismissed()
            self._end_silent()
            for rank, why in self.poll().items():
                self.lost[rank] = why
                print(f"\nATTENTION: {why}\n  the others go on without it\n", flush=True)
            self._dismiss()
            if self.running and self._all_fenced():
                break
            self.wait([sign for member in self.running for sign in member.handle.signs()], POLL_S)
        return HostResults(self.results, self.lost)

    @property
    def ends_all(self) -> bool:
        """Whether a failure on this host ends the whole run, and not only the processes of this host."""
        over = [m for m in self.members if not self._well(m)]
        return any(not m.role.apart or (m.handle.failure is not None and m.handle.failure.ends_run) for m in over)

    def _ended(self, member: StartedProcess) -> None:
        """Handle an ended process: keep its result, replace it, or go on without it."""
        member.handle.poll()  # what it sent before it ended
        if member.handle.failure is not None:
            self._silent.pop(_life_of(member), None)  # its own report is more exact
        self.running.remove(member)
        if self._well(member):
            self.results[member.role.name][member.rank] = member.handle.value
            if member.role.apart:
                self.board[0].set(f"done/{member.role.name}/{member.rank}", "its process has done its work")
            return
        death, why = self._death(member), self._silent.get(_life_of(member), "its process ended")
        if not self._can_do_without(member):
            self._replace(member, death)
            return
        if member.life:
            self.board[0].set(f"lost/{member.role.name}/{member.rank}/{member.life}", why)
            # until it is admitted again: the earlier life may have been admitted
            self.board[0].set(f"fenced/{member.role.name}/{member.rank}", why)
        other = self._started_instead(member, death)
        self.deaths = [before for before in self.deaths if str(before.of) != str(member)]
        self.deaths.append(Death(member, death, other.life if other is not None else 0))
        if other is not None:
            return
        self.lost[member.rank] = str(death)
        self.board[0].set(f"lost/{member.role.name}/{member.rank}", why)
        print(f"\nATTENTION: {self.lost[member.rank]}\n  the others go on without it\n", flush=True)

    def _death(self, member: StartedProcess) -> RunFailed:
        """The error that describes the process's death."""
        if why := self._silent.get(_life_of(member)):
            return Died(f"{member} was lost and is ended: {why}\n  its log: {member.handle.log}", str(member))
        return failed_first([member])

    def _replace(self, member: StartedProcess, death: RunFailed) -> None:
        """Replace a process that the others cannot do without.

        Raises:
            RunFailed: it cannot be replaced.
        """
        if member.role.apart or self._started_instead(member, death) is None:
            raise self._cause(member)

    def _started_instead(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        """Start a process in place of a dead one, and swap the two in ``members``; returns None if none is started.

        No worker is started after another worker has returned, or after the workers were asked to save and leave.
        """
        late = member.role.name == "worker" and (self.results[member.role.name] or self.board[0].check([LEAVE]))
        if (other := None if late else self.restart(member, death)) is not None:
            self.running.append(other)
            self.members.append(other)
        if other is not None or member.role.apart:
            self.members.remove(member)
        return other

    def _cause(self, member: StartedProcess) -> RunFailed:
        """The error with which the run ends because of this member.

        If the member's own failure names an earlier death of a worker (a server that cannot go on without it says so,
        and workers repeat the server's words), that death is the cause, unless another worker was admitted in place of
        the dead one. Otherwise the cause is what has failed first.
        """
        if _life_of(member) in self._silent:
            return self._death(member)
        failure = member.handle.failure
        dead = {str(death.of) for death in self.deaths}
        if (
            failure is not None
            and failure.for_users
            and (failure.follows or not member.role.apart)
            and {*failure.missing} <= dead
        ):
            for death in reversed(self.deaths):
                let_in = ADMITTED.format(death.of.rank, death.life)
                if re.search(rf"\b{death.of}\b", failure.words) and not (death.life and self.board[0].check([let_in])):
                    return death.error
        without = [m for m in self.members if self._well(m) or (m.role.apart and _ends_alone(m))]
        return failed_first([m for m in self.members if m is member or m not in without])

    def _can_do_without(self, member: StartedProcess) -> bool:
        """Whether the run goes on without this failed process: others of its role are there, and it just died.

        A failure that the process reports itself (RunFailed, UserError) ends the run, unless the failure is that the
        others have declared this process lost.
        """
        role = member.role
        others = (
            any(m.role.name == role.name and self._goes_on(m) for m in self.running if m is not member)
            or self.results[role.name]
            # a host with a server goes on for the workers of other hosts; the first worker's host keeps the result
            or (role.first_rank > 0 and role.here < role.size and any(not m.role.apart for m in self.running))
        )
        failure = member.handle.failure
        return member.role.apart and bool(others) and (failure is None or _ends_alone(member))

    def _goes_on(self, member: StartedProcess) -> bool:
        """Whether a process takes part in the run: it is admitted, not silent, and not dead."""
        member.handle.poll()
        has_died = member.handle.exitcode is not None and not self._well(member)
        if has_died and (member.handle.failure is None or _ends_alone(member)):
            return False
        return _life_of(member) not in self._silent and self._takes_part(member)

    def _dismiss(self) -> None:
        """Let returned processes end; the processes of a role that need each other end together."""
        for member in self.running:
            peers = [m for m in self.running if m.role.name == member.role.name and not member.role.apart]
            if member.handle.returned and all(peer.handle.returned for peer in peers):
                member.handle.dismiss()
                self._dismissed.setdefault(_life_of(member), self.clock())

    def _end_dismissed(self) -> None:
        """Kill dismissed processes that do not end: a thread of the user's, or a library's teardown, holds them."""
        for member in self.running:
            since = self._dismissed.get(_life_of(member))
            if since is not None and self.clock() - since > STAY_S and _life_of(member) not in self._stayed:
                self._stayed.add(_life_of(member))
                print(f"\n{member} has done its work, and does not end within {STAY_S} s: it is killed\n", flush=True)
                member.handle.signal(signal.SIGKILL)

    def _end_silent(self) -> None:
        """Kill workers that the servers report as silent; the servers wait for their end, and the others go on."""
        if self.clock() - self._polled < SERVERS_EVERY_S:
            return
        self._polled = self.clock()
        for member in self.running:
            at_work = not member.handle.returned and member.handle.failure is None
            if not (member.role.name == "worker" and member.role.apart and at_work):
                continue
            if why := note_of(self.board[0], SILENT.format(member.rank, member.life)):
                self._silent[_life_of(member)] = why
                member.handle.signal(signal.SIGKILL)

    def _well(self, member: StartedProcess) -> bool:
        """Whether a process has returned and ended, by itself or because it was killed afterwards."""
        killed = _life_of(member) in self._stayed or _life_of(member) in self._silent
        return member.handle.well or (member.handle.returned and killed)

    def at_work(self) -> list[StartedProcess]:
        """The running workers that take part and have not returned; if there are none, those that wait for admission.

        Servers are left out: a server is idle while no worker asks it, as in a validation.
        """
        busy = [m for m in self.running if m.role.name == "worker" and not m.handle.returned]
        return [m for m in busy if self._takes_part(m)] or busy

    def unneeded(self, members: Sequence[StartedProcess]) -> bool:
        """Whether all other workers have returned, so that the run does not need these.

        Workers return together, after a last meeting. One that still runs afterwards hangs at its exit.
        """
        others = [m for m in self.members if m.role.name == "worker" and m not in members]
        return bool(others) and all(m.role.apart for m in members) and all(self._well(m) for m in others)

    def _takes_part(self, member: StartedProcess) -> bool:
        """Whether a process is part of the run; a restarted one is from its admission on."""
        return not member.returns or self.board[0].check([ADMITTED.format(member.rank, member.life)])

    def _all_fenced(self) -> bool:
        """Whether all running processes have been declared lost for ``LINGER_S``: stopped processes never end by
        themselves."""
        if not (why := self._fenced()):
            return False
        now = self.clock()
        if self._unneeded_since is None:
            self._unneeded_since = now
        if now - self._unneeded_since <= LINGER_S:
            return False
        for member in self.running:
            self.lost[member.rank] = f"{member} was lost and is ended: {why[member.rank]}"
            print(f"\nATTENTION: {self.lost[member.rank]}\n", flush=True)
        return True

    def _fenced(self) -> dict[int, str]:
        """Why each running process was declared lost (by rank); empty if one of them still takes part."""
        why = {}
        for member in self.running:
            reason = "it was started again, and the run was over before it could take part"
            if self._takes_part(member):
                reason = note_of(self.board[0], f"fenced/{member.role.name}/{member.rank}")
            if not (member.role.apart and reason):
                return {}
            why[member.rank] = reason
        return why


def end(handles: Sequence[Handle], patience_s: float) -> None:
    """Kill processes, and wait for their end. SIGTERM would ask workers to save, and waiting workers ignore it."""
    for handle in handles:
        handle.signal(signal.SIGKILL)
    until = time.monotonic() + patience_s
    for handle in handles:
        handle.join(max(0.0, until - time.monotonic()))
    with suppress(NoNote):  # host 0 is gone, and its board with it
        for handle in handles:
            handle.dismiss()


def _life_of(member: StartedProcess) -> str:
    return f"{member}, life {member.life}"


def _lingers(member: StartedProcess) -> bool:
    """Whether a process has failed some time ago and does not end: a thread or a library's teardown holds it."""
    failure = member.handle.failure
    return failure is not None and time.monotonic_ns() - failure.at > LINGER_S * 1e9


def _ends_alone(member: StartedProcess) -> bool:
    """Whether the failure that a process has reported leaves the others running."""
    failure = member.handle.failure
    return failure is not None and not failure.ends_run
