"""What the launchers of a run's hosts tell each other: why the run ends, who is lost, whose processes are done."""

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
from trainer.launch.rendezvous import Meeting
from trainer.launch.started_process import Role

ENDED, ASKED, LEFT, KNOWS = "ended", "ended/asked", "left/host/{}", "knows/host/{}"
LOOK_S = 0.5
"""Between two looks at what others say."""
TELL_S = 1.5
"""Time for a last word."""
HEARD_S = 3.0
"""Longest wait of host 0, whose store all read, for the others to know that the run has ended, and why."""
LEAVE_S = 60.0
"""The last meeting of the workers is over when a host leaves: the others leave as soon as their processes have
ended."""


class OtherHosts:
    """The link of one host's launcher to the launchers of the run's other hosts.

    Args:
        board: of the run. In a list, because the frames of an error would keep it open.
        roles: the processes of this host.
    """

    def __init__(
        self,
        board: Sequence[Board],
        meeting: Meeting,
        roles: Sequence[Role],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board, self.meeting, self.clock = board, meeting, clock
        self.end_announced = False
        self._looked = clock()
        self._elsewhere = {
            f"{role.name}/{rank}": rank
            for role in roles
            if role.apart and meeting.serves
            for rank in range(role.size)
            if not role.first_rank <= rank < role.first_rank + role.here
        }
        self._workers_here = max((role.here for role in roles if role.name == "worker"), default=1)
        self._lost_hosts: dict[int, int] = {}

    def poll(self) -> Mapping[int, str]:
        """Return lost processes of other hosts without which the run goes on (rank -> why), each once; host 0 only.

        Raises:
            AskedToLeave: another host was asked to leave, and there was nothing new to save.
            RunFailed: another host has ended the run, or is lost.
        """
        if self.clock() - self._looked < LOOK_S:
            return {}
        self._looked = self.clock()
        board = self.board[0]
        if self.meeting.hosts > 1 and board.check([ENDED]):
            host, _, why = board.get(ENDED).decode().partition(" ")
            if int(host) != self.meeting.number:
                self.end_announced = True
                asked, message = board.check([ASKED]), f"{self.meeting.name(int(host))} has ended the run: {why}"
                self._say({KNOWS.format(self.meeting.number): ""})
                raise AskedToLeave(message, elsewhere=True) if asked else RunFailed(message)
        self.meeting.watch(board)
        return {rank: self._lose(who, rank) for who, rank in list(self._elsewhere.items()) if self._is_lost(who)}

    def _is_lost(self, who: str) -> bool:
        return self.board[0].check([f"fenced/{who}"])

    def _lose(self, who: str, rank: int) -> str:
        del self._elsewhere[who]
        host = rank // self._workers_here
        self._lost_hosts[host] = self._lost_hosts.get(host, 0) + 1
        why = self.board[0].get(f"fenced/{who}").decode()
        where = (
            self.meeting.name(host) if self.meeting.labels else f"{who.replace('/', ' ')} on {self.meeting.name(host)}"
        )
        return f"{where} is lost: {why}"

    def end(self, why: str, asked: bool = False) -> None:
        """Tell the other hosts that the run ends and why, unless one of them has told it first. Host 0 waits until they
        know.

        Args:
            asked: this host was asked to leave, and there was nothing new to save: the run can go on later.
        """
        if self.meeting.hosts == 1:
            return
        if not self.end_announced:
            self._tell(why, asked)
        patience = Patience(HEARD_S, self.clock)
        with suppress(NoNote):
            while self.meeting.serves and not self._all_know() and patience.left() > 0.0:
                time.sleep(LOOK_S / 5)

    def _tell(self, why: str, asked: bool) -> None:
        first_line = why.strip().splitlines()[0]
        notes = {ASKED: ""} if asked else {}
        self._say({**notes, ENDED: f"{self.meeting.number} {first_line}", KNOWS.format(self.meeting.number): ""})

    def _others(self) -> list[int]:
        """The other hosts, without those of which all workers are lost."""
        lost = {host for host, workers in self._lost_hosts.items() if workers == self._workers_here}
        return sorted(set(range(1, self.meeting.hosts)) - lost)

    def _all_know(self) -> bool:
        """Whether each other host knows that the run has ended, or has left."""
        hosts = self._others()
        return all(any(self.board[0].check([key.format(host)]) for key in (KNOWS, LEFT)) for host in hosts)

    def lose(self, who: Sequence[str], why: str) -> None:
        """Tell the servers which processes of this host are gone, if the run goes on without them."""
        if self.meeting.hosts > 1:
            self._say({**{f"lost/{name}": why for name in who}, KNOWS.format(self.meeting.number): ""})

    def _say(self, notes: Mapping[str, str]) -> None:
        """Leave notes, if the board takes them soon: the way to it may be cut."""
        board = self.board[0]

        def say() -> None:
            with suppress(RuntimeError):
                for key, note in notes.items():
                    board.set(key, note)

        saying = threading.Thread(target=say, daemon=True, name="last-words")
        saying.start()
        saying.join(TELL_S)

    def leave(self, results: dict[str, dict[int, Any]]) -> None:
        """Tell the other hosts that this host's processes are done.
        Host 0, whose store they use, waits for them; its results get what their servers returned."""
        if self.meeting.hosts == 1:
            return
        with suppress(NoNote):  # host 0 waits no longer
            self.board[0].set(LEFT.format(self.meeting.number), json.dumps(results.get("server", {})))
        if not self.meeting.serves:
            return
        patience = Patience(LEAVE_S, self.clock)
        for host in self._others():
            key = LEFT.format(host)
            while not self.board[0].check([key]) and patience.left() > 0.0:
                time.sleep(LOOK_S / 5)
            if not self.board[0].check([key]):
                print(
                    f"\nATTENTION: {self.meeting.name(host)} does not say that its processes have ended\n", flush=True
                )
                continue
            for rank, result in json_text.loads(self.board[0].get(key)).items():
                results.setdefault("server", {})[int(rank)] = result
