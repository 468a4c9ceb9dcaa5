"""One parameter server without sockets and clocks: messages and the time come in, answers go to an outlet."""

# States of a server:
#   empty -> loading -> ready -> over
#   empty: no START has come. Requests that need parameters wait.
#   loading: the first START has come; rows of torch's own tables may follow. ready: the last START has come.
#   over: every worker has left or is lost. `server.py` ends the process then.
# Who moves it: `parameters.py` (START), `liveness.py` (BYE, lost workers).
#
# Way of a request: `take` drops it (malformed), fails it (its worker's life is over), or hands it to
# `request_queue.py`, which answers it or lets it wait. Each verb has one handler, an object of its own.
#
# What must always hold:
# - A request has one answer, and a copy of it changes nothing. A push is known by its worker's sequence number; START,
#   SAVE, SHRINK and RATE by (incarnation, number); LEASE and MEET by remembered answers. The others may be repeated.
# - `report_done` is called before an answer leaves: the launcher knows of every update that a worker takes for done.
# - Time in which the server was stopped or busy does not count as silence of a worker (`_was_away`).
# - A server never comes back alone. Its death ends all processes of the run, which go back to the newest checkpoint.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import Missing
from trainer.host.notes_board import Board
from trainer.strategies.builtin import PserverDeclaration
from trainer.strategies.pserver.protocol.messages import Malformed, Message, Verb, text
from trainer.strategies.pserver.server.answers import failed
from trainer.strategies.pserver.server.checks import NotFinite
from trainer.strategies.pserver.server.epoch_blocks import Leases
from trainer.strategies.pserver.server.lease_requests import LeaseRequests
from trainer.strategies.pserver.server.ledger import Ledger
from trainer.strategies.pserver.server.liveness import Liveness
from trainer.strategies.pserver.server.meetings import Meetings
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.pulls import Pulls
from trainer.strategies.pserver.server.pushes import Pushes
from trainer.strategies.pserver.server.request_queue import Outlet, RequestQueue
from trainer.strategies.pserver.server.saving import PartWriter, Saving
from trainer.strategies.pserver.server.server_assignment import ServersRun
from trainer.weights.server_files import ServerFile, parts_of

CHECK_S = 0.2
"""Time between two checks for silent workers and overdue requests, and the longest wait for messages."""
AWAY_S = 0.2
"""A turn that is so much too late, or lasts so long, shows that the process was stopped or had no processor."""
ONCE = (Verb.START, Verb.SAVE, Verb.SHRINK, Verb.RATE)
"""A late copy of these must not be done again: the parameters have changed since."""


class Server:
    """One server: the objects that do what is asked for, and the queue of requests.

    Args:
        number: which one this is. run: what it is told of the run. declared: the run's strategy. outlet: where answers
        go. board: where launchers and servers leave notes for each other. now: the clock, in seconds. most_bytes: the
        longest frame that is taken. ledger: told of what is applied. life: random number of this start. writer: of
        parts of checkpoints; None: they are written in turn.
    """

    def __init__(
        self,
        number: int,
        run: ServersRun,
        declared: PserverDeclaration,
        outlet: Outlet,
        board: Board,
        now: Callable[[], float],
        most_bytes: int,
        ledger: Ledger | None = None,
        life: int = 0,
        writer: PartWriter | None = None,
    ) -> None:
        plan, options, ledger = run.plan, declared.options, ledger or Ledger()
        self.number, self.outlet, self.now = number, outlet, now
        self.members = Members(plan.topology.workers, options.lost_after_s, now)
        self.parameters = Parameters(run.config, declared, plan, number, self.members, outlet.room, run.resume)
        self.requests = RequestQueue(outlet, self.answer, number, options.timeout_s, now)
        self.leases = Leases(run.config.data.on_lost_worker == "take_over")
        stops = not declared.traits.survives
        self.meetings = Meetings(self.members, lambda: self.work.stood_still())
        self.liveness = Liveness(
            self.members, self.parameters, self.leases, self.requests, self.meetings, board, stops, most_bytes
        )
        lose, read_notes = self.liveness.lose, self.liveness.check_workers
        self.work = LeaseRequests(self.leases, self.members, lose, read_notes, options.timeout_s, now)
        self.count: Counter[str] = Counter(pushes=0, pulls=0, duplicates=0, fenced=0, nonfinite=0)
        self.started = self.ended_turn = self.checked_at = now()
        self.done_once: dict[int, tuple[int, int]] = {}
        self.reported_done = 0
        self.report_done: Callable[[int], None] = lambda done: None
        """Called with the number of updates done, before an answer that tells of them is sent."""
        pulls = Pulls(self.parameters, self.count)
        pushes = Pushes(self.parameters, self.members, self.work, self.requests.waits, self.count, ledger)
        self.saving = Saving(
            self.parameters, self.members, self.work, outlet, ledger, Path(plan.paths.run_dir), board, life, writer
        )
        if run.resume and (saved := parts_of(Path(run.resume))):
            self._go_on(saved)
        self.verbs: dict[Verb, Callable[[Message], Message]] = {
            Verb.HELLO: self.liveness.hello,
            Verb.START: self.parameters.start,
            Verb.PULL: pulls.pull,
            Verb.PUSH: pushes.push,
            Verb.COMMIT: pushes.commit,
            Verb.MEET: self.meetings.meet,
            Verb.LEASE: self.work.lease,
            Verb.FENCE: self.work.fence,
            Verb.SAVE: self.saving.save,
            Verb.FETCH: self.saving.fetch,
            Verb.SHRINK: self.parameters.shrink,
            Verb.RATE: self.parameters.rate,
            Verb.STATS: self.stats,
            Verb.BYE: self.liveness.bye,
            Verb.ADMIT: self.liveness.admit,
        }

    def _go_on(self, saved: Sequence[ServerFile]) -> None:
        """Restore saved state: with as many servers as before each its own part, else each from all parts."""
        own = saved[self.number : self.number + 1] if len(saved) == self.parameters.servers else saved
        self.work.go_on([part.meta.get("progress", {}) for part in own], own[0].meta.get("leases", {}))

    @property
    def over(self) -> bool:
        """Whether every worker has left or is lost."""
        return not any(member.present for member in self.members.all)

    def turn(self, messages: Sequence[tuple[bytes, Message]]) -> None:
        """Take these messages, each with its address for the answer; from time to time check for missing workers.

        Raises:
            Missing: no worker is left, or one is lost that the run cannot go on without.
        """
        since = self.now()
        self._was_away(since - self.ended_turn - CHECK_S)
        self.ended_turn = since
        for address, message in messages:
            self.take(address, message)
            since = self._spent(since)
        if self.ended_turn - self.checked_at >= CHECK_S:
            self._check_waiting(since)
        if self.over and all(m.lost or m.coming for m in self.members.all):
            lost = {f"worker {m.rank}": m.lost or "it was started again" for m in self.members.all}
            reasons = "; ".join(f"{worker}: {why}" for worker, why in lost.items())
            raise Missing(f"no worker is left ({reasons})", list(lost))

    def _check_waiting(self, since: float) -> None:
        """Check for missing workers and overdue requests. To answer the waiting requests may take long once a worker is
        lost."""
        self.checked_at = self.ended_turn
        again = [self.requests.try_again] * self.saving.has_written()  # that may be what a request waits for
        for check in (self.liveness.check_workers, self.requests.end_overdue, *again):
            check()
            since = self._spent(since)

    def _spent(self, since: float) -> float:
        """Do not count the time that passed since ``since`` as silence of a worker if it was long: the server was busy
        or stopped. Returns the time from which to go on counting."""
        self.ended_turn = now = self.now()
        if now - since <= AWAY_S:
            return since
        self._was_away(now - since)
        return now

    def _was_away(self, seconds: float) -> None:
        """Do not count time in which this server took no messages as silence or waiting: each part adds it to its
        limits."""
        if seconds > AWAY_S:
            for part in (self.members, self.work, self.requests):
                part.away(seconds)

    def take(self, address: bytes, message: Message) -> None:
        """Take one message: a heartbeat, a malformed one, one of a life that is over, or a request."""
        self.members.heard(message.rank)
        if message.verb == Verb.BEAT:
            return
        if message.verb not in self.verbs:
            self.outlet.refuse(Malformed(f"{message.verb.name} is no request"))
            return
        if message.verb != Verb.HELLO and (why := self.members.why_refused(message.rank, message.incarnation)):
            self.count["fenced"] += 1
            self.outlet.answer(address, message, failed(why, fenced=True))
            return
        self.requests.take(address, message)

    def answer(self, request: Message) -> Message:
        """Do what a request asks for, tell how far this server is, and answer.

        Raises:
            NotYet: it has to wait. NotFinite: its values are refused, and counted.
        """
        try:
            answer = self._do(request)
        except NotFinite:
            self.count["nonfinite"] += 1
            raise
        if (done := self.parameters.version) != self.reported_done:
            self.report_done(done)
            self.reported_done = done
        return answer

    def _do(self, request: Message) -> Message:
        """Do what a request asks for. A late copy of a request that must not be repeated changes nothing.

        Raises:
            NotYet: it has to wait.
        """
        if request.verb not in ONCE:
            return self.verbs[request.verb](request)
        this = request.incarnation, request.number
        if this <= self.done_once.get(request.rank, (0, 0)):
            flags = self.saving.flags if request.verb == Verb.SAVE else 0
            return Message(Verb.DONE, clock=self.parameters.version, flags=flags)
        answer = self.verbs[request.verb](request)
        self.done_once[request.rank] = this
        return answer

    def stats(self, message: Message) -> Message:
        """STATS: answer what this server has done so far."""
        return Message(Verb.DONE, records=[text(self.statistics())])

    def statistics(self) -> dict[str, Any]:
        """This server's counts since the start."""
        shard, rule = self.parameters.shard, self.parameters.rule
        tables = {t.name: t.memory() | {"dropped": t.dropped} for t in shard.tables.values()} if shard else {}
        return {
            "server": self.number,
            "seconds": round(self.now() - self.started, 3),
            "version": self.parameters.version,
            "step": self.parameters.step,
            "age": self.parameters.age,
            "samples": self.parameters.samples,
            "scale": getattr(shard and shard.schedule, "scale", 1.0),
            **self.count,
            **self.outlet.counts(),
            "waiting": len(self.requests.waiting),
            "rows": sum(int(t["rows"]) for t in tables.values()),
            "tables": tables,
            "staleness": {str(k): v for k, v in sorted(rule.staleness.items())} if rule else {},
            "lost": {str(m.rank): m.lost for m in self.members.all if m.lost},
            "leases_taken_over": self.leases.taken_over,
            "leases_dropped": self.leases.dropped,
        }
