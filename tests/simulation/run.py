"""One simulated run: servers, workers, a launcher that watches them, faults at their times, and what must be so in the
end."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tests.notes import Notes
from tests.simulation.boards import FarBoard
from tests.simulation.checkpoints import Before, Checkpoints
from tests.simulation.close_deaths import CloseDeaths
from tests.simulation.disks import Disks
from tests.simulation.hosts import Hosts
from tests.simulation.scenario import CLOSE_BY, DEATHS, LOST_AFTER_S, OF_HOSTS, TIMEOUT_S, Fault, Scenario
from tests.simulation.servers import SimulatedServer, declared
from tests.simulation.stage import STAGE
from tests.simulation.waits import FETCHING_S, MARGIN_S, PARTS_S, WRITES
from tests.simulation.workers import KILLED, LEAVES, SimulatedWorker, step
from tests.simulation.world import Network, Violation, World
from trainer.errors import RunFailed
from trainer.strategies.lost_workers import ADMITTED, SILENT, is_lost
from trainer.strategies.pserver.protocol.messages import Message, Verb
from trainer.strategies.pserver.server.liveness import Liveness
from trainer.strategies.pserver.worker.geo import PserverGeo
from trainer.strategies.pserver.worker.worker import PserverWorker

LONGEST_S = 10_000.0
"""Of virtual time; no run may take longer."""
LOOP_S = TIMEOUT_S + MARGIN_S
"""Who waits by looking again and again, for a block or to be let in, waits no longer than for an answer while nobody
does anything."""
LINGER_S = 5.0
"""As launch/supervisor.py: so long processes go on of which the others have declared all lost."""

NOTHING = Before(Checkpoints(lambda: None), None, None, frozenset(), 0)
TORN = {
    "torn push": (Verb.PUSH, False),
    "torn stop": (Verb.MEET, True),
    "torn meeting": (Verb.MEET, False),
    "torn goodbye": LEAVES,
}
"""The message at which a worker dies, and whether at a stop."""
WITH_CODEC = 8
"""In one run of so many, messages travel in frames."""


@dataclass
class Outcome:
    """What a seed has come to.

    Attributes:
        end: ``done``, or why the run failed. violation: which promise was broken; empty: none.
    """

    scenario: Scenario
    end: str
    violation: str
    injected: Counter[str]
    trace: list[str] = field(default_factory=list)
    virtual_s: float = 0.0


def simulate(scenario: Scenario, tracing: bool = False) -> Outcome:
    """Play a scenario to its end."""
    world = World(scenario.seed, tracing)
    STAGE.world, STAGE.codec = world, scenario.seed % WITH_CODEC == 0
    play = Play(world, scenario, 0, NOTHING)
    violation = ""
    with STAGE.ready():
        try:
            play.run()
            while play.end != "done" and (play.goes_back or play.life < len(scenario.ends)):
                following = play.gone_back() if play.goes_back else scenario.of_life(play.life + 1)
                play = Play(world, following, play.life + 1, play.left())
                play.run()
        except Violation as broken:
            violation = str(broken)
        except Exception as error:  # a bug of the product, as a traceback would be
            violation = f"{type(error).__name__}: {error}"
            if tracing:
                world.trace += traceback.format_exc().splitlines()
        finally:
            play.close()
    return Outcome(scenario, play.end, violation, world.injected, world.trace, world.now)


class Play:
    """The processes of a run from their start to their end, and their launcher.

    Args:
        life: 0; later ones go on where the one before was.
        before: what that has left.
    """

    def __init__(self, world: World, scenario: Scenario, life: int, before: Before) -> None:
        self.world, self.scenario, self.life, self.before = world, scenario, life, before
        self.saved, self.network = Checkpoints(self.is_saved), Network(world, scenario)
        self.hosts = Hosts(self) if scenario.places else None
        self.board: Notes | FarBoard = self.hosts.board if self.hosts else Notes()
        self.disks = Disks(world, json if any(scenario.hosts) else STAGE)  # what travels between hosts has a length
        self.disks.may_fail = bool(self.hosts and self.hosts.may_end())
        STAGE.disks = self.disks
        self.strategy, resume = declared(scenario), ""
        if before.number is not None:
            resume = str(step(before.number))
            self.disks.parts[resume] = before.disks.parts[resume]
        self.servers = [self.make_server(n, n + 1, resume) for n in range(scenario.servers)]
        for server in self.servers:
            server.torn = {p for name in server.vectors for p in before.torn.get(name, ())} | self.torn(server.vectors)
        self.moved = {p for pieces in before.torn.values() for p in pieces} | self.torn(before.counts)
        """Pieces that a row may lack which has come from another server."""
        self.close_deaths = CloseDeaths(self) if scenario.close else None
        self.workers = [
            SimulatedWorker(
                world,
                r,
                scenario,
                self.board,
                self.saved,
                self.to_server,
                self.worker_ended,
                self.settled,
                0,
                None if before.number is None else before.saved.part(before.number, r),
                self.hosts and self.hosts.of_worker(r),
            )
            for r in range(scenario.workers)
        ]
        for worker in self.workers:
            worker.saved_last = before.number or 0
        self.processes = {w.address: w for w in self.workers}
        self.end = ""
        self.gone: dict[int, str] = {}
        self.came_back: list[int] = []
        self.killed_servers = 0
        self.goes_back = False
        self.happened: list[Fault] = []
        """Deaths of servers, which do not happen again when all have gone back."""
        self.silent: set[tuple[int, int]] = set()
        self.postponed: list[tuple[float, Fault]] = []
        self.unneeded_since: float | None = None
        self.powerless = False
        for worker in self.workers if scenario.others and before.number is not None else ():
            worker.saved_last = before.number or 0
        world.after(1.0, self.look)
        for fault in scenario.faults:
            world.after(fault.at, self.happens, fault)
        if self.close_deaths and life:
            self.close_deaths.all_are_back()

    def gone_back(self) -> Scenario:
        """What those are told who are started again after a server's death."""
        return replace(self.scenario.without(self.happened), goes_back=self.scenario.goes_back - 1)

    def run(self) -> None:
        """From the start to the end.

        Raises:
            Violation: a promise is broken.
        """
        self.world.run(self.world.now + LONGEST_S)
        self.check_end()

    def is_saved(self) -> None:
        """There is a checkpoint. Deaths that waited for one come at the next multiple of their time."""
        looks = []
        for at, fault in self.postponed:
            times = [at]
            while times[-1] <= self.world.now:
                times.append(times[-1] + fault.seconds)
            looks.append((times[::-1], fault))
        for times, fault in sorted(looks, key=lambda look: look[0][1:]):  # at one time in the order of the times before
            self.world.at(times[0], self.happens, fault)
        if self.life < len(self.scenario.ends):
            self.world.after(self.scenario.ends[self.life], self.loses_power)

    def loses_power(self) -> None:
        """All processes die at once."""
        self.world.injected["all die"] += not self.end
        self.powerless = True
        self.fails("all processes are killed")

    def left(self) -> Before:
        """What the next life goes on from: the newest checkpoint, of these processes or of those before."""
        self.close()
        self.world.begin_again()
        if self.saved.newest is None:
            return self.before
        dropped = self.before.dropped + self.servers[0].dropped
        torn = {name: frozenset(s.torn) for s in self.servers for name in s.vectors}
        lost = self.before.lost | {rank for rank, why in self.gone.items() if why}
        lost |= {r for r in range(len(self.workers)) if is_lost(self.board, r)}
        newest = self.saved.newest
        if self.scenario.mode == "sync":  # a worker without a part was lost before
            whose = self.saved.whole[newest].share.workers
            lost = self.before.lost if whose is None else frozenset(range(self.scenario.workers)) - {*whose}
        self.world.injected["goes on"] += 1
        counts = {}
        if self.scenario.others:
            self.world.injected["goes on with other numbers"] += 1
            parts = self.disks.parts[str(step(newest))]
            counts = {name: one for s in self.servers for name, one in s.counts_of(parts[s.number]).items()}
        return Before(self.saved, self.disks, newest, frozenset(lost), dropped, torn, counts)

    def torn(self, vectors: Iterable[str]) -> set[int]:
        """Pieces that the other servers of the checkpoint had and these vectors of the model lack. Where servers are
        more or fewer they count as applied, because no vector may see one twice: a worker was lost in the middle of
        their push."""
        counts = self.before.counts
        if not counts or len(self.servers) == len(self.before.disks.parts[str(step(self.before.number))]):
            return set()
        most = np.max([applied for _, applied in counts.values()], axis=0)
        return {p for name in vectors for p in np.flatnonzero(counts[name][1] < most - 0.5).tolist()}

    def unsure(self) -> list[int]:
        """Pieces of workers that were lost before the checkpoint, where work is split beforehand: what they had done is
        in no part of it, and the next ones begin where the first one is."""
        scenario, lost = self.scenario, self.before.lost
        if scenario.leased:
            return []
        return [p for p in range(scenario.batches * scenario.epochs) if (p % scenario.batches) // scenario.each in lost]

    def make_server(self, number: int, life: int, resume: str) -> SimulatedServer:
        """A server's process; ``resume``: the checkpoint that it goes on from."""
        server = SimulatedServer(
            self.world,
            number,
            self.scenario,
            self.strategy,
            self.board,
            self.disks,
            self.before.counts,
            self.to_worker,
            self.heartbeats,
            self.server_ended,
            resume,
            self.unsure(),
            life,
            self.hosts and self.hosts.of_server(number),
        )
        liveness = server.machine.liveness
        liveness.lose = partial(self._loses, liveness, liveness.lose)  # type: ignore[method-assign]
        return server

    def _loses(self, liveness: Liveness, lose: Callable[[int, str], None], rank: int, why: str) -> None:
        """A server takes a worker for lost.

        Raises:
            Violation: others do its work from now on, and it may wake, although its launcher could have ended it.
        """
        worker, silence = self.workers[rank], why.startswith("nothing was heard") and not is_lost(self.board, rank)
        alone = liveness.members.present() == [rank] or liveness._cannot_go_on(rank)
        if silence and not (alone or worker.dead or worker.ended or self.scenario.helpless or self.hosts):
            raise Violation(f"worker {rank} is taken for lost, and may wake")
        lose(rank, why)

    # --- messages --------------------------------------------------------------------------------------------------

    def to_server(self, server: int, request: Message, address: bytes) -> None:
        which = request.rank, server, request.number
        self.network.send(which[:2], which, self._reaches, server, request, address)

    def _reaches(self, server: int, request: Message, address: bytes) -> None:
        """A request arrives."""
        self.servers[server].deliver(request, address)

    def to_worker(self, server: int, answer: Message, address: bytes) -> None:
        which = answer.rank, server, answer.number
        self.network.send(which[:2], which, self.processes[address].deliver, answer)

    def heartbeats(self, server: int) -> list[int]:
        """Whose signs of life come to a server now. They may be lost, too, but not one after another."""
        came = []
        for worker in self.workers:
            way = worker.rank, server
            if worker.dead or worker.ended or worker.stopped or self.network.cut(*way):
                continue
            if way not in self.silent and self.world.random.random() < self.scenario.drop:
                self.silent.add(way)
            else:
                self.silent.discard(way)
                came.append(worker.rank)
        return came

    def settled(self, strategy: PserverWorker) -> None:
        """In geo a worker's copies are now the servers' rows, unless a server still takes what a lost worker has sent.

        Raises:
            Violation: they are not.
        """
        if not isinstance(strategy, PserverGeo) or any(
            s.machine.members.present() != strategy.present for s in self.servers
        ):
            return
        for number, replica in strategy.replicas.items():
            for server in self.servers:
                shard = server.machine.parameters.shard
                assert shard is not None
                ids = np.sort(replica.index.ids())
                ids = ids[shard.owns(number, ids)]
                copies, kept = replica.look_up(ids).numpy(), shard.tables[number].pull(ids, create=False).numpy()
                if np.abs(copies - kept).max(initial=0.0) > 1e-6:
                    raise Violation(
                        f"worker {strategy.seat.rank} has rows {copies[:, 0].tolist()} where {server.name} "
                        f"has {kept[:, 0].tolist()}"
                    )

    # --- faults ----------------------------------------------------------------------------------------------------

    def happens(self, fault: Fault) -> None:
        if self.hosts and fault.kind in OF_HOSTS:
            self.hosts.happens(fault)
            return
        worker, server = self.workers[fault.worker], self.servers[fault.server]
        process = server if fault.kind.endswith("server") else worker
        if process.dead or process.ended:
            return
        if (
            fault.kind.startswith(("kill", "torn"))
            and fault.seconds
            and self.saved.newest is None
            and self.scenario.goes_back
        ):
            self.postponed.append((self.world.now, fault))  # until there is a checkpoint to go back to
            return
        happened = 1
        match fault.kind.split()[0]:
            case "stop":
                process.stop(fault.seconds)
            case "suspend":
                process.stop(fault.seconds, suspended=True)
            case "kill" if process is worker:
                worker.kill()
            case "kill":
                self.happened.append(fault)
                self.kill_server(server)
            case "cut":
                self.world.say(f"worker {fault.worker} is cut off from server {fault.server} for {fault.seconds:g} s")
                self.network.cut_until[fault.worker, fault.server] = self.world.now + fault.seconds
            case "reset":
                self.network.reset(fault.worker, fault.server)
            case "clock":
                process.jump(fault.seconds)
            case "torn":
                worker.doomed = TORN[fault.kind]
            case "nonsense":
                happened = server.gets_nonsense(fault.worker)
        self.world.injected[fault.kind] += happened

    def kill_server(self, server: SimulatedServer) -> None:
        server.dead = True
        self.world.say(f"{server.name} is killed")
        self.world.after(0.2, self._server_died, server)

    def _server_died(self, server: SimulatedServer) -> None:
        """As job/restarts.py: all processes are started again, from the newest checkpoint if there is one."""
        self.killed_servers += 1
        self.goes_back = self.scenario.goes_back > 0 and not self.end
        self.world.injected["all go back"] += self.goes_back
        self.fails(f"{server.name} was killed")

    # --- the launcher ----------------------------------------------------------------------------------------------

    def worker_ended(self, rank: int, why: str, fatal: bool) -> None:
        """As launch/supervisor.py: what a worker says itself of why the run cannot be ends it; others do without one
        that died."""
        if self.end or self.gone.get(rank):
            return
        self.gone[rank] = why
        if why == KILLED and self.close_deaths:
            self.close_deaths.worker_died()
        if not why:
            self._tells(rank, f"done/worker/{rank}", "well")
            self._done()
            return
        others, again = [w for w in self.workers if self._goes_on(w)], why == KILLED or self.workers[rank].missed
        if fatal or not others or (self.scenario.mode == "sync" and self.scenario.options["on_lost_worker"] == "stop"):
            self.fails(f"worker {rank}: {why}", self._host(rank))
        elif again and self.unneeded_since is None and len(self.came_back) < self.scenario.returns:
            self._starts_again(rank)
        else:
            self._tells(rank, f"lost/worker/{rank}", "its process ended")
            self._done()

    def _goes_on(self, worker: SimulatedWorker) -> bool:
        """Whether it has not died, and does not wait to be let in."""
        waits = worker.number > 0 and not self.board.check([ADMITTED.format(worker.rank, worker.life)])
        return not (worker.dead or waits or self.gone.get(worker.rank))

    def _host(self, rank: int) -> int:
        return self.hosts.of_worker(rank)[1] if self.hosts else 0

    def _tells(self, rank: int, note: str, what: str) -> None:
        """The launcher of a worker's host leaves a note."""
        if self.hosts:
            self.hosts.tells(self._host(rank), note, what)
        else:
            self.board.set(note, what)

    def _starts_again(self, rank: int) -> None:
        """As launch/process_restarts.py: another process begins in the place of one that has died."""
        before = self.workers[rank]
        self.board.set(f"lost/worker/{rank}/{before.life}", "its process ended")
        self.board.set(f"fenced/worker/{rank}", "its process ended")
        del self.gone[rank]
        self.came_back.append(rank)
        self.world.injected["started again"] += 1
        worker = self.workers[rank] = SimulatedWorker(
            self.world,
            rank,
            self.scenario,
            self.board,
            self.saved,
            self.to_server,
            self.worker_ended,
            self.settled,
            before.number + 1,
        )
        worker.doomed = before.doomed if before.doomed == LEAVES else None
        self.processes[worker.address] = worker

    def server_ended(self, number: int, error: RunFailed | None) -> None:
        if error is not None:
            self.fails(f"server {number}: {error}", self.hosts.of_server(number)[1] if self.hosts else 0)
        self._done()

    def look(self) -> None:
        """Processes that still run although the others have lost them all are ended after a while.

        Raises:
            Violation: nobody does anything.
        """
        may = LOOP_S + WRITES * self.scenario.disk_s + self.scenario.parted_s + PARTS_S * bool(self.hosts)
        if self.hosts and any(worker.found_saving for worker in self.workers):
            # A server of a host that has ended cannot take back its note: it is waited for at its part, then at the
            # meeting.
            may += 2 * FETCHING_S
        if (since := self.world.now - self.world.moved) > may:
            raise Violation(f"nothing was computed or written for {since:.0f} s, and may be for {may:g}")
        self._end_silent()
        if all(s.ended for s in self.servers):
            running = [w for w in self.workers if w.rank not in self.gone]
            if all(is_lost(self.board, w.rank) for w in running):
                self.unneeded_since = self.world.now if self.unneeded_since is None else self.unneeded_since
                if self.world.now - self.unneeded_since > LINGER_S:
                    for worker in running:
                        worker.kill()
        self.world.after(1.0, self.look)

    def _end_silent(self) -> None:
        """As launch/supervisor.py, where the launcher is not stopped or cut off itself."""
        for worker in () if self.scenario.helpless else self.workers:
            reached = self.hosts is None or self.hosts.store.comes_back(self._host(worker.rank)) <= self.world.now
            note = SILENT.format(worker.rank, worker.life)
            if reached and not worker.ended and self.board.check([note]) and self.board.get(note):
                self.world.injected["ended for its silence"] += not worker.dead
                worker.kill()

    def fails(self, why: str, host: int = 0) -> None:
        """The launcher ends all processes; of several hosts its own, and tells the others."""
        if self.hosts and not self.end and not self.powerless:
            self.hosts.ends(host, why)
        elif not self.end:
            self.end, self.world.over = why, True
            self.world.say(f"the run fails: {why}")

    def _done(self) -> None:
        """All processes may have ended."""
        if self.end or len(self.gone) < len(self.workers) or not all(s.ended or s.dead for s in self.servers):
            return
        if all(s.ended and not s.failed for s in self.servers):
            self.end, self.world.over = "done", True
        elif self.hosts and self.hosts.over:
            self.end, self.world.over = self.hosts.why, True

    def close(self) -> None:
        """Nothing goes on."""
        for worker in self.workers:
            worker.dead = True
            if worker.run:
                worker.run.throw()

    # --- the end ---------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """What must be so at the end.

        Raises:
            Violation: it is not.
        """
        if self.end != "done":
            self._check_failure()
            return
        for server in self.servers:
            self._check_pieces(server)
        if not any(self.gone.values()) and not self.came_back:
            self.disks.check_end()

    def _check_failure(self) -> None:
        """A run fails only for a reason that was injected."""
        lost_by_servers = {
            rank for s in self.servers for rank, m in enumerate(s.machine.members.all) if m.lost or m.coming
        }
        lost = (
            lost_by_servers
            | {rank for rank, why in self.gone.items() if why}
            | {w.rank for w in self.workers if not self._goes_on(w)}
        )
        lost = {rank for rank in lost if self._may_be_lost(rank)}
        stops = self.scenario.mode == "sync" and self.scenario.options["on_lost_worker"] == "stop"
        before_start = 0 in {*lost, *self.came_back} and not all(s.machine.parameters.ready for s in self.servers)
        if not (
            self.powerless
            or self.killed_servers
            or (lost and stops)
            or before_start
            or len(lost) == len(self.workers)
            or (self.hosts and self.hosts.may_end())
        ):
            raise Violation(f"the run fails without a cause: {self.end}")

    def _may_be_lost(self, rank: int) -> bool:
        """Whether anything happened to a worker that may have it declared lost."""
        own = [f for f in self.scenario.faults if f.worker == rank]
        silent = sum(f.seconds for f in own if f.kind in ("stop worker", "suspend worker", "cut"))
        victim = self.close_deaths is not None and rank in self.close_deaths.victims
        if self.hosts and self.hosts.may_be_lost(rank):
            return True
        return victim or silent > LOST_AFTER_S / 2 or any(f.kind in DEATHS + CLOSE_BY for f in own)

    def _check_pieces(self, server: SimulatedServer) -> None:
        """Every piece of work once; of lost workers at most once, where nobody takes over their work."""
        lost = [rank for rank, why in self.gone.items() if why]
        for rank in lost:
            if not self._may_be_lost(rank):
                raise Violation(f"worker {rank} was lost without a cause: {self.gone[rank]}")
        lost += self.before.lost
        told = server.applied()
        if server.steps is not None:
            server.steps.check_end()
        applied = np.rint(told).astype(int)
        if np.abs(told - applied).max(initial=0.0) > 1e-6:
            raise Violation(f"{server.name} holds parts of pieces: {told.tolist()}")
        if np.delete(applied, server.unsure).max(initial=0) > 1:
            raise Violation(f"{server.name} has applied piece {int(applied.argmax())} {applied.max()} times")
        least = applied if len(server.vectors) == 1 else np.rint(server.by_vector().min(0))
        if missing := self._missing([p for p in np.flatnonzero(least == 0).tolist() if p not in server.torn], lost):
            raise Violation(f"{server.name} has never applied piece {missing[0]}")
        self._check_rows(server, applied)

    def _missing(self, pieces: list[int], lost: list[int]) -> list[int]:
        """Those of these pieces for which there is no excuse."""
        scenario = self.scenario
        if not scenario.leased:
            return [p for p in pieces if (p % scenario.batches) // scenario.each not in lost]
        blocks = {p // scenario.block for p in pieces}
        dropped = 0 if scenario.take_over else self.servers[0].dropped + self.before.dropped
        return [] if len(blocks) <= dropped else pieces

    def _check_rows(self, server: SimulatedServer, applied: np.ndarray) -> None:
        """Rows tell the same as the dense values."""
        shard = server.machine.parameters.shard
        if server.rows is not None:
            server.rows.check()
        if not self.scenario.table or self.scenario.chooses_rows or shard is None:
            return
        if self.scenario.others and self.scenario.mode == "geo":  # a piece is worth as much as there were workers
            return
        table = shard.tables[1]
        own = np.arange(1, len(applied) + 1)
        own = own[shard.owns(1, own) & ~np.isin(own - 1, [*self.moved])]
        worth = table.pull(own, create=False).numpy()[:, 0]
        if self.scenario.mode == "sync":  # a step's mean is of those who were there: of a row as of the dense values
            told_twice = np.abs(worth - shard.vector.numpy()[own - 1]).max(initial=0.0) < 1e-6
        else:
            told_twice = (np.rint(worth * server.share) == applied[own - 1]).all()
        if not told_twice:
            raise Violation(f"{server.name}: rows {worth.tolist()} of pieces {applied[own - 1].tolist()}")
