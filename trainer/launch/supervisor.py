"""Watches started processes to their end, however they were started, and names the failure that ended the run."""

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
STAY_S = 30
"""So long a process may run on that has done its work: a thread of the user's own may still send something."""
LOOK_S = 0.5
"""Between two looks at what servers say of the workers."""
END_S = 3
"""So long the end of processes that got SIGKILL is waited for."""


@dataclass(frozen=True)
class Death:
    """A worker that has died and its error. ``life``: of the process that was started in its place, 0 if none was."""

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
        members: the started processes of this host. board: where losses are told and found. In a list, because the
        frames of an error would keep it open. wait: returns when one of these signs is ready, or after so many seconds.
        clock: seconds that only go forward. look: tells, now and then, who of other hosts is lost, by rank, and why;
        raises where they have ended the run. again: starts another process in the place of one that has died, tells so,
        and returns it; None: it does not, and the run
            ends where the others cannot do without it.
    """

    def __init__(
        self,
        members: Sequence[StartedProcess],
        board: Sequence[Board],
        wait: Callable[[list[Any], float], object],
        clock: Callable[[], float] = time.monotonic,
        poll: Callable[[], Mapping[int, str]] = dict,
        again: Callable[[StartedProcess, RunFailed], StartedProcess | None] = lambda member, death: None,
    ) -> None:
        self.board, self.wait, self.clock = board, wait, clock
        self.poll, self.again = poll, again
        self.members, self.running = list(members), list(members)
        """Without those that the run went on without; without all that have ended."""
        self.results: dict[str, dict[int, Any]] = {member.role.name: {} for member in members}
        self.lost: dict[int, str] = {}
        self.deaths: list[Death] = []
        """Of workers, the latest last. The run went on without them."""
        self._unneeded_since: float | None = None
        self._dismissed: dict[str, float] = {}
        self._stayed = set[str]()
        """Since when those may end that have done their work, and who of them was killed."""
        self._looked = clock()
        self._silent: dict[str, str] = {}
        """Why servers had processes ended."""

    def watch(self) -> HostResults:
        """Watch the processes to their end; returns what they returned, and why lost ones were done without.

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
                member.handle.signal(signal.SIGKILL)  # its own words count then, and not how it ended
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
        """Whether a failure on this host ends the processes of other hosts as well.
        They cannot do without the failed process, or it reported that the run cannot go on."""
        over = [m for m in self.members if not self._well(m)]
        return any(not m.role.apart or (m.handle.failure is not None and m.handle.failure.ends_run) for m in over)

    def _ended(self, member: StartedProcess) -> None:
        """Keep what it returned, or go on without it."""
        member.handle.poll()  # what it sent before it ended
        if member.handle.failure is not None:
            self._silent.pop(_which(member), None)  # its own words count
        self.running.remove(member)
        if self._well(member):
            self.results[member.role.name][member.rank] = member.handle.value
            if member.role.apart:
                self.board[0].set(f"done/{member.role.name}/{member.rank}", "its process has done its work")
            return
        death, why = self._death(member), self._silent.get(_which(member), "its process ended")
        if not self._can_do_without(member):
            self._replace(member, death)
            return
        if member.life:
            self.board[0].set(f"lost/{member.role.name}/{member.rank}/{member.life}", why)
            # until it is let in again, which the life before may have been
            self.board[0].set(f"fenced/{member.role.name}/{member.rank}", why)
        other = self._other(member, death)
        self.deaths = [before for before in self.deaths if str(before.of) != str(member)]
        self.deaths.append(Death(member, death, other.life if other is not None else 0))
        if other is not None:
            return
        self.lost[member.rank] = str(death)
        self.board[0].set(f"lost/{member.role.name}/{member.rank}", why)
        print(f"\nATTENTION: {self.lost[member.rank]}\n  the others go on without it\n", flush=True)

    def _death(self, member: StartedProcess) -> RunFailed:
        """Why it was lost."""
        if why := self._silent.get(_which(member)):
            return Died(f"{member} was lost and is ended: {why}\n  its log: {member.handle.log}", str(member))
        return failed_first([member])

    def _replace(self, member: StartedProcess, death: RunFailed) -> None:
        """Start another process in its place.

        Raises:
            RunFailed: none is.
        """
        if member.role.apart or self._other(member, death) is None:
            raise self._cause(member)

    def _other(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        """Have another process started in its place; it is one of the members from now on, and the dead one none.

        A worker would come too late where others have done their work, or save what they have and leave.
        """
        late = member.role.name == "worker" and (self.results[member.role.name] or self.board[0].check([LEAVE]))
        if (other := None if late else self.again(member, death)) is not None:
            self.running.append(other)
            self.members.append(other)
        if other is not None or member.role.apart:
            self.members.remove(member)
        return other

    def _cause(self, member: StartedProcess) -> RunFailed:
        """Why the run ends with that member: the latest death of a worker that the member's own words name as its
        cause, or else what has failed first now.

        Such words are a server's that cannot go on, or a worker's that had them from a server. Once another worker has
        been let in for the dead one, nothing follows from that death any more.
        """
        if _which(member) in self._silent:
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
        """Whether the run goes on although that process failed: others of its role are there, and it just died.

        What a process says itself of why the run cannot be (a RunFailed, a UserError) ends the run; that it was
        declared lost itself does not.
        """
        role = member.role
        others = (
            any(m.role.name == role.name and self._goes_on(m) for m in self.running if m is not member)
            or self.results[role.name]
            # a host with a server goes on for the workers of others; only the host of the first worker keeps what the
            # run comes to
            or (role.first_rank > 0 and role.here < role.size and any(not m.role.apart for m in self.running))
        )
        failure = member.handle.failure
        return member.role.apart and bool(others) and (failure is None or _ends_alone(member))

    def _goes_on(self, member: StartedProcess) -> bool:
        """Whether a process takes part, and has neither died as well, which may not be seen yet, nor is silent."""
        member.handle.poll()
        has_died = member.handle.exitcode is not None and not self._well(member)
        if has_died and (member.handle.failure is None or _ends_alone(member)):
            return False
        return _which(member) not in self._silent and self._takes_part(member)

    def _dismiss(self) -> None:
        """Let those end that have returned: all of a role together, as long as none of them can be done without."""
        for member in self.running:
            peers = [m for m in self.running if m.role.name == member.role.name and not member.role.apart]
            if member.handle.returned and all(peer.handle.returned for peer in peers):
                member.handle.dismiss()
                self._dismissed.setdefault(_which(member), self.clock())

    def _end_dismissed(self) -> None:
        """End those that have done their work long ago: a thread of their own, or a library's teardown, holds them."""
        for member in self.running:
            since = self._dismissed.get(_which(member))
            if since is not None and self.clock() - since > STAY_S and _which(member) not in self._stayed:
                self._stayed.add(_which(member))
                print(f"\n{member} has done its work, and does not end within {STAY_S} s: it is killed\n", flush=True)
                member.handle.signal(signal.SIGKILL)

    def _end_silent(self) -> None:
        """End workers that do nothing according to the servers, which wait for that: the others can do without them."""
        if self.clock() - self._looked < LOOK_S:
            return
        self._looked = self.clock()
        for member in self.running:
            at_work = not member.handle.returned and member.handle.failure is None
            if not (member.role.name == "worker" and member.role.apart and at_work):
                continue
            if why := note_of(self.board[0], SILENT.format(member.rank, member.life)):
                self._silent[_which(member)] = why
                member.handle.signal(signal.SIGKILL)

    def _well(self, member: StartedProcess) -> bool:
        """Whether it has done its work, and has ended by itself, or only because it was killed after that."""
        killed = _which(member) in self._stayed or _which(member) in self._silent
        return member.handle.well or (member.handle.returned and killed)

    def at_work(self) -> list[StartedProcess]:
        """The workers that run, take part and have not returned; if there are none, those that wait to be let in.

        A server does nothing while nobody asks it, as in a validation.
        """
        busy = [m for m in self.running if m.role.name == "worker" and not m.handle.returned]
        return [m for m in busy if self._takes_part(m)] or busy

    def unneeded(self, members: Sequence[StartedProcess]) -> bool:
        """Whether all other workers have done their work, so that the run is over without these. Workers end together,
        at a last meeting, unless they are lost: one that runs after that hangs on its way out."""
        others = [m for m in self.members if m.role.name == "worker" and m not in members]
        return bool(others) and all(m.role.apart for m in members) and all(self._well(m) for m in others)

    def _takes_part(self, member: StartedProcess) -> bool:
        """Whether it does not wait to be let in."""
        return not member.returns or self.board[0].check([ADMITTED.format(member.rank, member.life)])

    def _all_fenced(self) -> bool:
        """Whether the others have declared all that still run lost, for a while: stopped processes end by no word of
        anybody."""
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
        """Why each that runs was declared lost by the others, and was not let in again; empty if one was not."""
        why = {}
        for member in self.running:
            for_users = "it was started again, and the run was over before it could take part"
            if self._takes_part(member):
                for_users = note_of(self.board[0], f"fenced/{member.role.name}/{member.rank}")
            if not (member.role.apart and for_users):
                return {}
            why[member.rank] = for_users
        return why


def end(handles: Sequence[Handle], patience_s: float) -> None:
    """End watched processes at once by SIGKILL: workers would take SIGTERM for a request, and do not react while they
    wait."""
    for handle in handles:
        handle.signal(signal.SIGKILL)
    until = time.monotonic() + patience_s
    for handle in handles:
        handle.join(max(0.0, until - time.monotonic()))
    with suppress(NoNote):  # host 0 is gone: nobody is to be told
        for handle in handles:
            handle.dismiss()


def _which(member: StartedProcess) -> str:
    return f"{member}, life {member.life}"


def _lingers(member: StartedProcess) -> bool:
    """A process has failed some time ago and does not end: a thread of its own, or a library's teardown, holds it."""
    failure = member.handle.failure
    return failure is not None and time.monotonic_ns() - failure.at > LINGER_S * 1e9


def _ends_alone(member: StartedProcess) -> bool:
    """What the process has said of its end is no reason for others to end."""
    failure = member.handle.failure
    return failure is not None and not failure.ends_run
