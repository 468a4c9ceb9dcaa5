"""Several hosts: which processes are on each, their launchers, and what happens to the ways between them and to their
board."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.boards import FIRST, PATIENCE_S, FarBoard, FarStore, Store
from tests.simulation.scenario import LOST_AFTER_S, TIMEOUT_S, Fault

if TYPE_CHECKING:
    from tests.simulation.run import Play

TELL_S = 1.5
"""As trainer/launch/other_hosts.py: a launcher that ends tries so long to tell why."""
LOOK_S = 0.5
"""Launchers look so often at what others tell."""
AGAIN_MOST_S = 20.0
"""A request that is not answered is sent again after that at most, and TCP takes its time, too."""


class Hosts:
    """All hosts of a run.

    Attributes:
        over: those whose launchers have ended all their processes. why: what the first of them says.
    """

    def __init__(self, play: Play) -> None:
        self.play, self.world = play, play.world
        self.places = play.scenario.places
        self.hosts = sorted({FIRST, *self.places})
        self.store = Store(self.world)
        self.board = FarBoard(FarStore(self.store, FIRST, lambda: self.world.now, lambda seconds: None, float("inf")))
        self.over: set[int] = set()
        self.why = ""

    def of_worker(self, rank: int) -> tuple[Store, int]:
        """Its board and host."""
        return self.store, self.places[rank]

    def of_server(self, number: int) -> tuple[Store, int]:
        """Its board and host."""
        return self.store, self.places[self.play.scenario.workers + number]

    def happens(self, fault: Fault) -> None:
        """A fault of hosts or of their board."""
        until, hosts = self.world.now + fault.seconds, (fault.worker, fault.server)
        self.world.injected[fault.kind] += 1
        self.world.say(f"{fault.kind} {hosts if fault.kind.startswith('cut') else ''} for {fault.seconds:g} s")
        if fault.kind == "board slow":
            self.store.slow_until = max(self.store.slow_until, until)
            return
        cut_off = [host for host in self.hosts if host != FIRST]
        if fault.kind == "board away":
            self.store.away_until = max(self.store.away_until, until)
        else:
            workers = range(self.play.scenario.workers)
            self.play.network.part(
                [
                    (w, s)
                    for w in workers
                    for s in range(self.play.scenario.servers)
                    if {self.places[w], self.of_server(s)[1]} == {*hosts}
                ],
                fault.seconds,
            )
            cut_off = [hosts[1]] if hosts[0] == FIRST else []
            for host in cut_off:
                self.store.cut_until[host] = max(self.store.cut_until.get(host, 0.0), until)
        for host in cut_off:
            self.world.after(PATIENCE_S + LOOK_S, self._misses_the_board, host, self.world.now)

    def _misses_the_board(self, host: int, since: float) -> None:
        """Its launcher has asked the board again and again, since then in vain."""
        if self.store.comes_back(host) > self.world.now:
            self.ends(host, "host 0 cannot be reached")

    def tells(self, host: int, note: str, what: str) -> None:
        """A launcher leaves a note, which arrives when the board is there again; not if it gives up before."""
        if host not in self.over:
            self.world.at(self.store.comes_back(host), self._arrives, host, note, what)

    def _arrives(self, host: int, note: str, what: str) -> None:
        if host in self.over:
            return
        if self.store.comes_back(host) > self.world.now:
            self.tells(host, note, what)
        else:
            self.board.set(note, what)

    def ends(self, host: int, why: str) -> None:
        """A launcher ends all processes of its host. It tells the others if the board can be reached; the first one's
        board goes with it."""
        if host in self.over:
            return
        self.over.add(host)
        self.why = self.why or why
        self.world.say(f"host {host} ends: {why}")
        play = self.play
        for worker in play.workers:
            if self.places[worker.rank] == host and not (worker.dead or worker.ended):
                worker.dead = True
                if worker.run:
                    worker.run.throw()
            if self.places[worker.rank] == host:
                play.gone.setdefault(worker.rank, f"host {host} has ended: {why}")
        for server in play.servers:
            if self.of_server(server.number)[1] == host and not server.ended:
                server.dead = True
        back = max(self.world.now, self.store.comes_back(host))
        if back <= self.world.now + TELL_S or host == FIRST:
            for other in self.hosts:
                hears = max(back, self.store.comes_back(other)) + LOOK_S * self.world.random.random()
                self.world.at(hears, self.ends, other, f"host {host} has ended the run: {why}")
        if self.over == {*self.hosts}:
            play.end, self.world.over = self.why, True
        play._done()

    def may_end(self) -> bool:
        """Whether a run may fail for what happened to its hosts: they, or the board, were out of reach for longer than
        anybody waits; where messages are lost, too, for half of that."""
        patience_s = TIMEOUT_S / 2 if self.play.scenario.drop else TIMEOUT_S
        return self.play.scenario.parted_s + AGAIN_MOST_S >= patience_s

    def may_be_lost(self, rank: int) -> bool:
        """Whether a worker may be silent at a server for that."""
        if self.may_end():
            return True
        servers = {self.of_server(server)[1] for server in range(self.play.scenario.servers)}
        cuts = [f for f in self.play.scenario.faults if f.kind == "cut of hosts"]
        silent = [f.seconds for f in cuts if any({self.places[rank], host} == {f.worker, f.server} for host in servers)]
        return sum(silent) > LOST_AFTER_S / 2
