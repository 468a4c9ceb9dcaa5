"""The lobby where hosts of a run come and go (launch.nnodes=MIN:MAX): notes in host 0's store, for the whole run.

States of another host's command, by its notes; :class:`Guest` writes them, :class:`Lobby` on host 0 reads them:

    waiting    it has entered (``here/ID``, ``newest/NUMBER``) and beats (``beat/ID``); no life has its id yet
    in a life  host 0 has announced a life to it (``life/ID``); its processes run
    ended      its part of the life has ended, and it has written how: ``preempted``, ``died`` or ``failed``
    lost       host 0 has seen no beat for ``LOST_S``, or a newer command has its number
    gone       it has left the run (it says so), or host 0 has ended the run (``over``)

A life begins with :meth:`Lobby.gather` and :meth:`Lobby.begin`, and ends with :meth:`Lobby.settle`. Host 0 ends it
early if a host is lost, and asks for a checkpoint (``LEAVE`` on the life's board) if a host waits.

What always holds: each note has one writer, so nothing that was written while host 0 was stopped replaces a newer note.
Of several commands with one number only the newest counts. Each life has a store of its own
(:mod:`trainer.launch.rendezvous`): a process of an earlier life cannot reach the next one. Only time in which host 0
itself ran counts as silence. No note grows with the number of hosts, and each host but host 0 reads only notes for it
or for all, so that a life of N hosts costs messages and bytes in proportion to N.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.errors import Died, RunFailed, UserError
from trainer.host import json_text
from trainer.host.notes_board import Board, NoNote, OwnBoard, SealedBoard
from trainer.host.patience import LONGEST_POLL_S, Patience
from trainer.host.signals import LEAVE
from trainer.launch.rendezvous import differing, for_all, pause_of
from trainer.planning.run_secret import VARIABLE
from trainer.wording import counted

BEAT_S = 1.0
"""Time between two beats of a host."""
LOST_S = 15.0
"""A host without a beat for so long is lost, as with torchrun."""
POLL_S = 0.2
LEAVE_S = 5.0
"""Longest wait of a leaving host for host 0, which may be stopped or cut off, to take its last note."""
GOODBYE_S = 10.0
"""Longest wait of host 0, at the end of the run, for the others to read how the run ended."""
MARK_S = 10.0
"""Longest wait for a file in a folder that hosts share."""
HERE, BEAT, LIFE, OVER, MARK, TERMS = "here/{}", "beat/{}", "life/{}", "over", "mark", "terms"
"""Keys of notes. Those of a host carry the id of its command, so that each note has one writer; so do host 0's notes
for one host."""
MOST_NAMED = 16
"""Ranges of hosts that the line of a life names."""
NEWEST = "newest/{}"
"""Key of the id of the newest command with a host's number; notes of older commands are not read."""


@dataclass(frozen=True)
class Host:
    """The note of a host about itself.

    Attributes:
        id: random text of this start of its command.
        gone: it has left the run.
        ended: number of the last life that ended for it. how: ``preempted``, ``died`` (a process of it) or ``failed``.
        asked: the signal that asked this host to leave.
        why, who, update, done: see :class:`trainer.errors.Died`.
    """

    id: str
    gone: bool = False
    ended: int = 0
    how: str = ""
    asked: str = ""
    why: str = ""
    who: str = ""
    update: int = 0
    done: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Life:
    """A life of the run, as host 0 announces it to one of its hosts.

    Attributes:
        number: from 1. hosts: how many. place: of this host among them, from 0. names: of the hosts, for messages.
        port: of its rendezvous. resume: its checkpoint, relative to the run's folder if it lies there; '' without one.
    """

    number: int
    hosts: int
    place: int
    names: str
    port: int
    resume: str


def names_of(hosts: Sequence[int]) -> str:
    """The names of a life's hosts: ``hosts 0, 2 and 3``; of many hosts, ranges of numbers, and how many hosts more."""
    ranges: list[list[int]] = []
    for number in hosts:
        if len(hosts) > MOST_NAMED and ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    names = [str(of[0]) if len(of) == 1 else f"{of[0]}-{of[-1]}" for of in ranges]
    if more := sum(map(len, ranges[MOST_NAMED:])):
        names = [*names[:MOST_NAMED], f"{more} more"]
    first, last = ", ".join(names[:-1]), names[-1]
    return f"hosts {first} and {last}" if first else f"host{'s' * (len(hosts) > 1)} {last}"


@dataclass(frozen=True)
class RunOver:
    """Host 0's note that it has ended the run. ``how``: ``done``, ``preempted`` or ``failed``; ``why``: a sentence."""

    how: str
    why: str


def _newest(board: OwnBoard, number: int) -> str:
    """The id of the newest command with a host's number; empty: there is none."""
    return (board.find(NEWEST.format(number)) or b"").decode()


def _host_of(board: OwnBoard, id: str) -> Host:
    """The note of a command about its host."""
    return Host(**json_text.loads(board.get(HERE.format(id))))


class Lobby:
    """Host 0's side of the lobby: gathers the hosts of each life, and notices lost and waiting hosts.

    Args:
        board: in host 0's store. most: hosts are numbered below this.
        clock, sleep: monotonic seconds, and a wait of some seconds.

    Attributes:
        life: the current or the last life; number 0: there was none. ids: of the commands in it, by host number.
        resized: the current life ends, because a waiting host is to be admitted.
        how: how the run ends, unless it fails.
    """

    def __init__(
        self,
        board: OwnBoard,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.board, self.most, self.clock, self.sleep = board, most, clock, sleep
        self.hosts: dict[int, Host] = {}
        self.beats: dict[int, bytes] = {}
        self.silent: dict[int, float] = {}
        self.life, self.ids = Life(0, 1, 0, names_of([0]), 0, ""), dict[int, str]()
        self.pause_s = pause_of(most, POLL_S)
        self.resized = False
        self.how = "done"
        self._polled = clock()

    def poll(self) -> None:
        """Read the hosts' notes, and add up how long each host has been silent."""
        passed, self._polled = min(self.clock() - self._polled, LONGEST_POLL_S), self.clock()
        for number in range(1, self.most):
            if not (id := _newest(self.board, number)):
                continue
            host, beat = _host_of(self.board, id), self.board.get(BEAT.format(id))
            same = (self.hosts.get(number), self.beats.get(number)) == (host, beat)
            self.silent[number] = self.silent[number] + passed if same else 0.0
            self.hosts[number], self.beats[number] = host, beat

    def is_there(self, number: int) -> bool:
        """Whether a host beats, and has not left."""
        return number in self.hosts and not self.hosts[number].gone and self.silent[number] <= LOST_S

    def lost(self) -> list[int]:
        """The hosts of this life that were lost before the life ended for them: silent, gone, or restarted."""
        unended = {n: part for n, part in self.parts().items() if part.ended != self.life.number}
        return [n for n, part in unended.items() if part.id != self.hosts[n].id or not self.is_there(n)]

    def parts(self) -> dict[int, Host]:
        """The notes of this life's commands, by host number, also where a newer command has that number."""
        newest = [(n, id, self.hosts[n]) for n, id in self.ids.items()]
        return {n: host if host.id == id else _host_of(self.board, id) for n, id, host in newest}

    def waiting(self) -> list[int]:
        """The present hosts that are not in the current life, or for which it has ended."""
        present = {n: host for n, host in self.hosts.items() if self.is_there(n) and not host.asked}
        return [n for n, host in present.items() if host.id != self.ids.get(n) or host.ended == self.life.number]

    def _to_admit(self) -> list[int]:
        """The hosts that wait for admission: new ones, and those with a failed part of this life. A host that has
        finished its part only waits for the others."""
        waiting = {n: self.hosts[n] for n in self.waiting()}
        return sorted(n for n, host in waiting.items() if host.id != self.ids.get(n) or host.how in ("died", "failed"))

    def gather(self, least: int, timeout_s: float, more_s: float) -> list[int]:
        """Wait for the hosts of the next life; returns their numbers.

        Args:
            timeout_s: longest wait for ``least`` hosts. more_s: further wait for more hosts, up to the greatest number.

        Raises:
            RunFailed: too few hosts came in time.
        """
        patience, enough = Patience(timeout_s, self.clock), None
        while True:
            self.poll()
            found = [0, *sorted(self.waiting())]
            now = self.clock()
            enough = None if len(found) < least else now if enough is None else enough
            if enough is not None and (len(found) >= self.most or now - enough >= more_s):
                return found
            if patience.left() <= 0.0 and enough is None:
                there = f"{counted(len(found), 'host')} {'is' if len(found) == 1 else 'are'} there"
                needed = f"launch.nnodes={least}:{self.most} needs {least}"
                raise RunFailed(f"{there}, and {needed}: no more came within {timeout_s:g} s (launch.timeout_s)")
            self.sleep(self.pause_s)

    def begin(self, hosts: Sequence[int], port: int, resume: str) -> Life:
        """Begin the next life with these hosts, and announce it to each of them."""
        self.ids = {n: self.hosts[n].id for n in hosts if n}
        self.life, self.resized = Life(self.life.number + 1, len(hosts), 0, names_of(hosts), port, resume), False
        for place, id in enumerate(self.ids.values(), 1):
            self.board.set(LIFE.format(id), json.dumps(list(vars(replace(self.life, place=place)).values())))
        return self.life

    def watch(self, run: Board | None) -> None:
        """Check the hosts during a life: raise if one is lost; ask for a checkpoint if one waits for admission.

        Args:
            run: the board of this life; None: its hosts have not met yet.

        Raises:
            Died: a host is lost.
            RunFailed: a host has left.
        """
        self.poll()
        if lost := self.lost():
            if all(self.parts()[number].gone for number in lost):
                raise RunFailed(f"{' and '.join(f'host {n}' for n in lost)} left")
            raise self.death_of(lost)
        if run is not None and (come := self._to_admit()) and not self.resized:
            self.resized = True
            who = " and ".join(f"host {n}" for n in come)
            run.set(LEAVE, "")
            print(f"\n{who} came in: all save a checkpoint, and go on together\n", flush=True)

    def death_of(self, hosts: Sequence[int]) -> Died:
        """The error for a life that lost hosts. It names the life: two deaths of one name at one update end the run."""
        names = " and ".join(f"host {n}" for n in hosts)
        return Died(f"{names} {'is' if len(hosts) == 1 else 'are'} lost", f"{names} in life {self.life.number}")

    def settle(self, timeout_s: float) -> list[Host]:
        """Wait until each host has ended this life or is lost; returns the notes of the hosts that have ended it.

        The wait lasts at least ``LOST_S``, after which a dead host counts as lost.
        """
        patience = Patience(max(timeout_s, LOST_S + LONGEST_POLL_S), self.clock)
        while True:
            self.poll()
            lost, parts = self.lost(), self.parts()
            late = [n for n, part in parts.items() if n not in lost and part.ended != self.life.number]
            if patience.left() <= 0.0 or not late:
                return [part for n, part in parts.items() if n not in [*lost, *late]]
            self.sleep(self.pause_s)

    def end(self, how: str, why: str) -> None:
        """Announce how the run ended, and wait until all hosts have read it."""
        self.board.set(OVER, json.dumps([how, for_all(why)]))
        until = self.clock() + GOODBYE_S
        while self.clock() < until:
            self.poll()
            if not any(self.is_there(number) for number in self.hosts):
                return
            self.sleep(self.pause_s)


class Guest:
    """The lobby's side of every host but host 0.

    Args:
        board: in host 0's store. number: this host's. where: host 0's address, for messages.
        most: hosts are numbered below this.
    """

    def __init__(
        self, board: SealedBoard, number: int, where: str, most: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.board, self.number, self.where, self.sleep = board, number, where, sleep
        self.pause_s = pause_of(most, POLL_S)
        self.host = Host(secrets.token_hex(8))
        self._over = threading.Event()
        self._beats: threading.Thread | None = None
        self.replaced = False
        self._twice = f"there is another host {number} already: every host needs a launch.node_rank of its own"

    def come(self, run_dir: Path, terms: Mapping[str, Any]) -> None:
        """Enter the lobby, and beat from now on.

        Args:
            terms: what must be the same on all hosts (:mod:`trainer.launch.terms`).

        Raises:
            UserError: the run's folder is not the one that host 0 sees.
            RunFailed: another host has this number, host 0 has another secret or other terms, or host 0 is gone.
        """
        with self._reaching():
            self._check_folder(run_dir)
            self._check_terms(terms)
            beats = self.board.clone()  # before host 0 hears of this host: a slow connection would count as silence
            before = _newest(self.board, self.number)
            self._check_alone()
            self.tell()
            self.board.set(BEAT.format(self.host.id), "0")
            if _newest(self.board, self.number) != before:  # this process may have been stopped since the check
                raise RunFailed(self._twice)
            self.board.set(NEWEST.format(self.number), self.host.id)

        def beat() -> None:
            for number in itertools.count(1):
                if self.replaced or self._over.wait(BEAT_S):
                    return
                with suppress(NoNote):  # host 0 may only be stopped for a while
                    beats.send(BEAT.format(self.host.id), str(number))
                    self._check_replaced(beats)

        self._beats = threading.Thread(target=beat, daemon=True, name="signs-of-life")
        self._beats.start()

    def _check_alone(self) -> None:
        """Refuse to enter while another command with this number beats."""
        first = None
        for _ in range(round(3 * BEAT_S / POLL_S)):
            id = _newest(self.board, self.number)
            if not id or _host_of(self.board, id).gone:
                return
            beat = self.board.get(BEAT.format(id))
            if first not in (None, beat):
                raise RunFailed(self._twice)
            first = beat
            self.sleep(POLL_S)

    def _check_terms(self, own: Mapping[str, Any]) -> None:
        """Refuse a host that was started with another command than host 0; the others go on."""
        theirs, own = json_text.loads(self.board.get(TERMS)), json_text.loads(json.dumps(own, default=str))
        if key := differing(theirs, own):
            raise RunFailed(
                f"this host was started with another command: {key} is {own.get(key)} here and "
                f"{theirs.get(key)} on host 0. Type the same on all hosts. The run goes on without this host"
            )

    def _check_folder(self, run_dir: Path) -> None:
        while not self.board.check([MARK]):
            if self.board.forged(MARK):
                raise RunFailed(
                    f"host 0 knows another secret than this host. Give all hosts the same secret "
                    f"(launch.secret_file, or {VARIABLE})"
                )
            self.sleep(self.pause_s)
        mark = run_dir / self.board.get(MARK).decode()
        patience = Patience(MARK_S, time.monotonic)
        while not (mark.is_file() or self.board.check([OVER])):
            if patience.left() <= 0.0:
                why = (
                    "is not the folder that host 0 writes to, and hosts that come and go share the run's folder "
                    "with its checkpoints"
                )
                raise UserError(f"hydra.run.dir={run_dir}", why, "a folder on a file system that all hosts share")
            self.sleep(self.pause_s)

    def note(self, **what: object) -> None:
        """Change facts of this host's note, which is written with the next :meth:`tell`."""
        self.host = replace(self.host, **what)  # type: ignore[arg-type]

    def tell(self, **what: object) -> None:
        """Write this host's note, with changed facts, for host 0.

        Raises:
            RunFailed: host 0 is gone.
        """
        self.note(**what)
        with self._reaching():
            self.board.send(HERE.format(self.host.id), json.dumps(asdict(self.host)))

    def next_life(self, after: int) -> Life | RunOver:
        """Wait for a life after number ``after`` in which this host takes part, or for the end of the run.

        Raises:
            RunFailed: host 0 is gone, or another host has taken this one's place.
        """
        key = LIFE.format(self.host.id)
        while True:
            with self._reaching():
                self._check_replaced(self.board)
                if self.replaced:
                    raise RunFailed(
                        f"this host is no part of the run any more: another host {self.number} has come in its place, "
                        f"as it was stopped or cut off for a while. If both are to take part, every host needs a "
                        f"launch.node_rank of its own"
                    )
                if over := self.board.find(OVER):
                    return RunOver(*json_text.loads(over))
                announced = self.board.find(key)
            if announced and (life := Life(*json_text.loads(announced))).number > after:
                return life
            self.sleep(self.pause_s)

    def _check_replaced(self, board: SealedBoard) -> None:
        """Set ``replaced`` if a newer command has this host's number."""
        self.replaced = self.replaced or _newest(board, self.number) not in ("", self.host.id)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Context manager: a store that is gone becomes a RunFailed: host 0 is gone, and the run with it."""
        try:
            yield
        except NoNote as error:
            raise RunFailed(
                f"host 0 at {self.where} is gone, and the run with it: it keeps what hosts meet by ({error})"
            ) from error

    def leave(self) -> None:
        """Write that this host has left the run, if host 0 still answers; stop the beats."""
        if self._beats is None:
            return
        self._over.set()

        def say() -> None:
            with suppress(RunFailed):
                self.tell(gone=True)

        saying = threading.Thread(target=say, daemon=True, name="goodbye")
        saying.start()
        saying.join(LEAVE_S)
