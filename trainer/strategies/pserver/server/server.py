"""A server process: one thread that takes messages, changes its share of the parameters, and answers.

Every request has one answer, and may come twice. What a verb asks for is done by the object that has that duty.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.config.instantiate import call_target
from trainer.errors import RunFailed
from trainer.host.files import replace_file
from trainer.strategies.builtin import Pserver
from trainer.strategies.contract import Seat
from trainer.strategies.pserver.protocol.messages import ENDPOINT, Malformed, Message, Verb, text
from trainer.strategies.pserver.protocol.sockets import ServerSocket
from trainer.strategies.pserver.server.answers import failed
from trainer.strategies.pserver.server.leases import Leases
from trainer.strategies.pserver.server.liveness import Liveness
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.pulls import Pulls
from trainer.strategies.pserver.server.pushes import Pushes
from trainer.strategies.pserver.server.run import ServersRun
from trainer.strategies.pserver.server.saving import Saving
from trainer.strategies.pserver.server.totals import Totals
from trainer.strategies.pserver.server.turns import Turns
from trainer.strategies.pserver.server.work import Work

LOOK_MS = 200
SMALLEST_LIMIT = 64 << 20
ONCE = (Verb.START, Verb.SAVE, Verb.SHRINK, Verb.RATE)
"""A second copy of these, late, must not be done again: parameters have moved since."""


def serve(seat: Seat, run: ServersRun) -> dict[str, Any]:
    """Entry of the role ``server``: serve until every worker has left or is lost; returns what it has done.

    Raises:
        RunFailed: no worker is left, or a worker of a sync run was lost.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    server = Server(seat, run)
    assert seat.store is not None
    seat.store.set(ENDPOINT.format(seat.rank), server.socket.endpoint)
    print(f"server {seat.rank} listens at {server.socket.endpoint}", flush=True)
    try:
        server.run()
    finally:
        server.socket.close()
        server.leave_statistics(Path(run.plan.run_dir))
    return server.statistics()


class Server:
    """One server: its socket, the objects that do what is asked for, and the loop."""

    def __init__(self, seat: Seat, run: ServersRun) -> None:
        plan, size = run.plan, run.plan.roles["worker"]
        declared: Pserver = call_target(run.config.node("strategy"), "strategy", kind=Pserver)
        strategy, patience_s = declared.options, declared.options.timeout_s
        self.members = Members(size, strategy.lost_after_s)
        self.parameters = Parameters(run.config, declared, plan, seat.rank, self.members)
        self.seat = seat
        self.socket = _socket(seat, size, strategy.transport, plan.parameters)
        self.turns = Turns(self.socket, self.answer, seat.rank, patience_s)
        self.leases = Leases(run.config.data.on_lost_worker == "take_over")
        stops = not declared.traits.survives
        self.liveness = Liveness(self.members, self.parameters, self.leases, self.turns, seat.store, stops)
        self.work = Work(self.leases, self.members, self.liveness.lose, patience_s)
        self.count: Counter[str] = Counter(pushes=0, pulls=0, duplicates=0, fenced=0)
        self.started = time.monotonic()
        self.done_once: dict[int, tuple[int, int]] = {}
        pulls = Pulls(self.parameters, self.count)
        pushes = Pushes(self.parameters, self.members, self.work, self.turns.waits, self.count)
        totals = Totals(self.members)
        self.saving = Saving(self.parameters, self.members, self.work.progress, Path(plan.run_dir))
        self.verbs: dict[Verb, Callable[[Message], Message]] = {
            Verb.HELLO: self.liveness.hello,
            Verb.START: self.parameters.start,
            Verb.PULL: pulls.pull,
            Verb.PUSH: pushes.push,
            Verb.COMMIT: pushes.commit,
            Verb.MEET: totals.meet,
            Verb.LEASE: self.work.lease,
            Verb.FENCE: self.work.fence,
            Verb.SAVE: self.saving.save,
            Verb.SHRINK: self.parameters.shrink,
            Verb.RATE: self.parameters.rate,
            Verb.STATS: self.stats,
            Verb.BYE: self.liveness.bye,
        }

    def run(self) -> None:
        """Serve to the end.

        Raises:
            RunFailed: no worker is left, or a worker of a sync run was lost.
        """
        looked = 0.0
        while not self._over():
            messages = self.socket.receive(LOOK_MS)
            began = time.monotonic()
            for address, message in messages:
                self.take(address, message)
            now = time.monotonic()
            if now - began > LOOK_MS / 1000:
                self.members.deaf(now - began)
                self.work.deaf(now - began)
            if now - looked > LOOK_MS / 1000:
                looked = now
                self.liveness.look_after()
                self.turns.end_overdue()
        if all(m.lost for m in self.members.all):
            lost = "; ".join(f"worker {m.rank}: {m.lost}" for m in self.members.all)
            raise RunFailed(f"no worker is left ({lost})")

    def _over(self) -> bool:
        return not self.members.present()

    def take(self, address: bytes, message: Message) -> None:
        """One message: a heartbeat, one that is no request or comes from a life that is over, or a request."""
        self.members.heard(message.rank)
        if message.verb == Verb.BEAT:
            return
        if message.verb not in self.verbs:
            self.socket.refuse(Malformed(f"{message.verb.name} is no request"))
            return
        why = self.members.admit(message.rank, message.incarnation) if message.verb != Verb.HELLO else ""
        if why:
            self.count["fenced"] += 1
            self.socket.answer(address, message, failed(why, fenced=True))
            return
        self.turns.take(address, message)

    def answer(self, request: Message) -> Message:
        """Do what a request asks for. A late copy of one that must not be done again changes nothing.

        Raises:
            NotYet: it has to wait.
        """
        if request.verb not in ONCE:
            return self.verbs[request.verb](request)
        this = request.incarnation, request.number
        if this <= self.done_once.get(request.rank, (0, 0)):
            return Message(Verb.DONE, clock=self.parameters.version)
        answer = self.verbs[request.verb](request)
        self.done_once[request.rank] = this
        return answer

    def stats(self, message: Message) -> Message:
        """STATS: what has been done so far."""
        return Message(Verb.DONE, records=[text(self.statistics())])

    def statistics(self) -> dict[str, Any]:
        """Counts since the start."""
        shard, rule = self.parameters.shard, self.parameters.rule
        tables = {t.name: t.memory() | {"dropped": t.dropped} for t in shard.tables.values()} if shard else {}
        return {
            "server": self.seat.rank,
            "endpoint": self.socket.endpoint,
            "seconds": round(time.monotonic() - self.started, 3),
            "version": self.parameters.version,
            "step": self.parameters.step,
            "age": self.parameters.age,
            "scale": getattr(shard and shard.schedule, "scale", 1.0),
            **self.count,
            "bytes_in": self.socket.bytes_in,
            "bytes_out": self.socket.bytes_out,
            "waiting": len(self.turns.waiting),
            "refused": self.socket.malformed,
            "turned_away": self.socket.turned_away,
            "rows": sum(int(t["rows"]) for t in tables.values()),
            "tables": tables,
            "staleness": {str(k): v for k, v in sorted(rule.staleness.items())} if rule else {},
            "lost": {str(m.rank): m.lost for m in self.members.all if m.lost},
            "leases_taken_over": self.leases.taken_over,
            "leases_dropped": self.leases.dropped,
        }

    def leave_statistics(self, run_dir: Path) -> None:
        """``server.N.json`` in the run's folder, where there is one; and the log."""
        told = json.dumps(self.statistics(), indent=1)
        print(told, flush=True)
        if run_dir.is_dir():
            replace_file(run_dir / f"server.{self.seat.rank}.json", told)


def _socket(seat: Seat, workers: int, transport: str, parameters: int) -> ServerSocket:
    """Where workers reach this server: a Unix socket where all processes are on this host, else TCP."""
    limit = max(SMALLEST_LIMIT, 24 * int(parameters))
    folder = seat.folder if transport == "auto" else ""
    return ServerSocket(seat.secret, seat.rank, workers, seat.host, limit, folder)
