"""Notes between the launchers of a run's hosts: why the run ends, which processes are lost, which hosts are done."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.errors import AskedToLeave, RunFailed
from trainer.host import json_text
from trainer.host.notes_board import Board, NoNote
from trainer.host.patience import Patience
from trainer.launch.rendezvous import Rendezvous, for_all, pause_of
from trainer.launch.started_process import Role

ENDED, ASKED, LEFT, KNOWS = "ended", "ended/asked", "left/host/{}", "knows/host/{}"
POLL_S = 0.5
"""Time between two readings of the other hosts' notes, among few hosts."""
TELL_S = 1.5
"""Longest wait for the last notes to be written."""
HEARD_S = 3.0
"""Longest wait of host 0, which keeps the store, for the others to read why the run has ended; at least the time of
three readings."""
LEAVE_S = 60.0
"""Longest wait of host 0 for the other hosts' last note. The workers' last meeting is over then."""


class OtherHosts:
    """The link of one host's launcher to the launchers of the run's other hosts.

    Args:
        board: the run's; in a list, because the frames of an error would keep the board open.
        roles: the processes of this host.
    """

    def __init__(
        self,
        board: Sequence[Board],
        rendezvous: Rendezvous,
        roles: Sequence[Role],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board, self.rendezvous, self.clock = board, rendezvous, clock
        self.end_announced = False
        self._polled, self._pause_s = clock(), pause_of(rendezvous.hosts, POLL_S)
        self._elsewhere = {
            f"{role.name}/{rank}": rank
            for role in roles
            if role.apart and rendezvous.serves
            for rank in range(role.size)
            if not role.first_rank <= rank < role.first_rank + role.here
        }
        self._workers_here = max((role.here for role in roles if role.name == "worker"), default=1)
        self._lost_hosts: dict[int, int] = {}

    def poll(self) -> Mapping[int, str]:
        """Return newly lost processes of other hosts that the run goes on without (rank -> reason); host 0 only.

        Raises:
            AskedToLeave: another host was asked to leave, and there was nothing new to save.
            RunFailed: another host has ended the run, or is lost.
        """
        if self.clock() - self._polled < self._pause_s:
            return {}
        self._polled = self.clock()
        board = self.board[0]
        if self.rendezvous.hosts > 1 and board.check([ENDED]):
            host, _, why = board.get(ENDED).decode().partition(" ")
            if int(host) != self.rendezvous.number:
                self.end_announced = True
                asked, message = board.check([ASKED]), f"{self.rendezvous.name(int(host))} has ended the run: {why}"
                self._say({KNOWS.format(self.rendezvous.number): ""})
                raise AskedToLeave(message, elsewhere=True) if asked else RunFailed(message)
        self.rendezvous.watch(board)
        lost = [(who, rank) for who, rank in self._elsewhere.items() if board.check([f"fenced/{who}"])]
        return {rank: self._lose(who, rank) for who, rank in lost}

    def _lose(self, who: str, rank: int) -> str:
        """Count a lost process of another host; returns the sentence about it."""
        del self._elsewhere[who]
        host = rank // self._workers_here
        self._lost_hosts[host] = self._lost_hosts.get(host, 0) + 1
        why = self.board[0].get(f"fenced/{who}").decode()
        where = (
            self.rendezvous.name(host)
            if self.rendezvous.labels
            else f"{who.replace('/', ' ')} on {self.rendezvous.name(host)}"
        )
        return f"{where} is lost: {why}"

    def end(self, why: str, asked: bool = False) -> None:
        """Announce the end of the run and its reason, unless another host has done so. Host 0 waits for the readers.

        Args:
            asked: this host was asked to leave, and there was nothing new to save: the run can go on later.
        """
        if self.rendezvous.hosts == 1:
            return
        if not self.end_announced:
            self._tell(why, asked)
        patience = Patience(max(HEARD_S, 3 * self._pause_s), self.clock)
        with suppress(NoNote):
            while self.rendezvous.serves and not self._all_know() and patience.left() > 0.0:
                time.sleep(POLL_S / 5)

    def _tell(self, why: str, asked: bool) -> None:
        first_line = for_all(why.strip().splitlines()[0])
        notes = {ASKED: ""} if asked else {}
        self._say({**notes, ENDED: f"{self.rendezvous.number} {first_line}", KNOWS.format(self.rendezvous.number): ""})

    def _others(self) -> list[int]:
        """The numbers of the other hosts, without those whose workers are all lost."""
        lost = {host for host, workers in self._lost_hosts.items() if workers == self._workers_here}
        return sorted(set(range(1, self.rendezvous.hosts)) - lost)

    def _all_know(self) -> bool:
        """Whether each other host has read that the run has ended, or has left."""
        hosts = self._others()
        return all(any(self.board[0].check([key.format(host)]) for key in (KNOWS, LEFT)) for host in hosts)

    def lose(self, who: Sequence[str], why: str) -> None:
        """Report to the servers which processes of this host are gone; the run goes on without them."""
        if self.rendezvous.hosts > 1:
            self._say({**{f"lost/{name}": why for name in who}, KNOWS.format(self.rendezvous.number): ""})

    def _say(self, notes: Mapping[str, str]) -> None:
        """Write notes, but give up after ``TELL_S``: the connection may be cut."""
        board = self.board[0]

        def say() -> None:
            with suppress(RuntimeError):
                for key, note in notes.items():
                    board.set(key, note)

        saying = threading.Thread(target=say, daemon=True, name="last-words")
        saying.start()
        saying.join(TELL_S)

    def leave(self, results: dict[str, dict[int, Any]]) -> None:
        """Report that this host's processes are done.

        Host 0, which keeps the store, waits for the others; its results get the results of their servers.
        """
        if self.rendezvous.hosts == 1:
            return
        with suppress(NoNote):  # host 0 has given up waiting
            self.board[0].set(LEFT.format(self.rendezvous.number), json.dumps(results.get("server", {})))
        if not self.rendezvous.serves:
            return
        patience = Patience(LEAVE_S, self.clock)
        for host in self._others():
            key = LEFT.format(host)
            while not self.board[0].check([key]) and patience.left() > 0.0:
                time.sleep(POLL_S / 5)
            if not self.board[0].check([key]):
                print(
                    f"\nATTENTION: {self.rendezvous.name(host)} does not say that its processes have ended\n",
                    flush=True,
                )
                continue
            for rank, result in json_text.loads(self.board[0].get(key)).items():
                results.setdefault("server", {})[int(rank)] = result
