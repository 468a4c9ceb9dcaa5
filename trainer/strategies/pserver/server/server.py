"""A server process: one thread that takes messages, changes its share of the parameters, and answers.

Every request has one answer, and may come twice. A request that has to wait (for parameters of a later step, for others
at a meeting) stays in ``waiting`` and is tried again whenever something has changed, until its time is over.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config.instantiate import locate
from trainer.errors import RunFailed, UserError
from trainer.host.files import replace_file
from trainer.optim.schedules import Plateau
from trainer.strategies.contract import Seat
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.codec import decode, encode
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.protocol.messages import (
    CREATES,
    ENDPOINT,
    HOLDS,
    RESTS,
    WAKES,
    WANTS_DENSE,
    Kind,
    Malformed,
    Message,
    Record,
    Verb,
    text,
)
from trainer.strategies.pserver.protocol.sockets import ServerSocket
from trainer.strategies.pserver.server.leases import Answer, Leases, Progress
from trainer.strategies.pserver.server.members import Meetings, Members, workers
from trainer.strategies.pserver.server.rules import RULES, Geo, Push, Rule, Ssp, Sync
from trainer.strategies.pserver.server.shard import Rows, Shard
from trainer.strategies.pserver.server.starting import kept_by

LOOK_MS = 200
SMALLEST_LIMIT = 64 << 20
MOST_WAITING = 100
"""Requests of one worker that may wait here; no client has so many under way."""
MOST_WORK = 1 << 16
LARGEST_NUMBER = 1 << 53
NONSENSE = (Malformed, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""What a request raises whose content makes no sense, and a disk that is full; its sender is told, the server goes on."""
ONCE = (Verb.START, Verb.SAVE, Verb.SHRINK, Verb.RATE)
"""A second copy of these, late, must not be done again: parameters have moved since."""


class NotYet(Exception):
    """A request has to wait: for whom, at what."""

    def __init__(self, ranks: list[int], what: str) -> None:
        super().__init__(what)
        self.ranks, self.what = ranks, what


@dataclass(eq=False)
class Waiting:
    """A request that waits since then."""

    address: bytes
    request: Message
    since: float

    def is_of(self, rank: int) -> bool:
        """Whether that worker sent it."""
        return self.request.rank == rank


def serve(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Entry of the role ``server``: serve until every worker has left or is lost; returns what it has done.

    Raises:
        RunFailed: no worker is left, or a worker of a sync run was lost.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    server = Server(seat, payload)
    assert seat.store is not None
    seat.store.set(ENDPOINT.format(seat.rank), server.socket.endpoint)
    print(f"server {seat.rank} listens at {server.socket.endpoint}", flush=True)
    try:
        server.run()
    finally:
        server.socket.close()
        server.leave_statistics(Path(payload["run_dir"]))
    return server.statistics()


class Server:
    """The state of one server, and one method for each verb."""

    def __init__(self, seat: Seat, payload: Mapping[str, Any]) -> None:
        self.seat = seat
        self.config, self.plan = payload["config"], payload["plan"]
        self.strategy = self.config["strategy"]
        self.run_dir = Path(payload["run_dir"]).resolve()
        self.size = self.plan["roles"]["worker"]
        limit = max(SMALLEST_LIMIT, 24 * int(self.plan["parameters"]))
        folder = seat.folder if self.strategy["transport"] == "auto" else ""
        self.socket = ServerSocket(seat.secret, seat.rank, self.size, seat.host, limit, folder)
        self.members = Members(self.size, self.strategy["lost_after_s"])
        self.meetings = Meetings(self.members)
        self.leases = Leases(self.config["data"]["on_lost_worker"] == "take_over")
        self.progress = Progress()
        self.leased: dict[int, tuple[int, int, Message]] = {}
        self.work_moved = time.monotonic()
        self.done_once: dict[int, tuple[int, int]] = {}
        self.shard: Shard | None = None
        self.rule: Rule | None = None
        self.ready = False
        self.waiting: list[Waiting] = []
        self.age = 0
        self.age_before = 0  # of the run that these parameters come from, where workers' steps count
        self.count = dict.fromkeys(("pushes", "pulls", "duplicates", "fenced"), 0)
        self.started = time.monotonic()
        self.verbs: dict[Verb, Callable[[Message], Message]] = {
            Verb.HELLO: self.hello, Verb.START: self.start, Verb.PULL: self.pull, Verb.PUSH: self.push, Verb.MEET: self.meet,
            Verb.COMMIT: self.commit, Verb.LEASE: self.lease, Verb.FENCE: self.fence, Verb.SAVE: self.save,
            Verb.STATS: self.stats, Verb.SHRINK: self.shrink, Verb.BYE: self.bye, Verb.RATE: self.rate,
        }  # fmt: skip

    def run(self) -> None:
        """Serve to the end."""
        looked = 0.0
        while not self._over():
            messages = self.socket.receive(LOOK_MS)
            began = time.monotonic()
            for address, message in messages:
                self.take(address, message)
            now = time.monotonic()
            if now - began > LOOK_MS / 1000:
                self.members.deaf(now - began)
                self.work_moved += now - began
            if now - looked > LOOK_MS / 1000:
                looked = now
                self.look_after()
        if all(m.lost for m in self.members.all):
            lost = "; ".join(f"worker {m.rank}: {m.lost}" for m in self.members.all)
            raise RunFailed(f"no worker is left ({lost})")

    def _over(self) -> bool:
        return not self.members.present()

    def take(self, address: bytes, message: Message) -> None:
        """One message: answer it, let it wait, or refuse it. What waits is tried again."""
        self.members.heard(message.rank)
        if message.verb == Verb.BEAT:
            return
        if message.verb == Verb.HELLO:
            self._try(Waiting(address, message, time.monotonic()))
        elif message.verb not in self.verbs:
            self.socket.refuse(Malformed(f"{message.verb.name} is no request"))
            return
        elif why := self.members.admit(message.rank, message.incarnation):
            self.count["fenced"] += 1
            self.socket.answer(address, message, failed(why, fenced=True))
            return
        else:
            known = [w for w in self.waiting if w.is_of(message.rank) and w.request.number == message.number]
            if known:
                known[0].address = address
                return
            self._try(Waiting(address, message, time.monotonic()))
        if self.waiting:
            self.try_again()

    def _try(self, waiting: Waiting) -> bool:
        """Answer a request if it can be answered now; else it stays in the list."""
        request = waiting.request
        try:
            answer = self._once(request) if request.verb in ONCE else self.verbs[request.verb](request)
        except NotYet:
            if waiting in self.waiting:
                return False
            if sum(w.is_of(request.rank) for w in self.waiting) < MOST_WAITING:
                self.waiting.append(waiting)
                return False
            answer = self._refused(request, Malformed(f"{MOST_WAITING} of its requests wait already"))
        except NONSENSE as error:
            answer = self._refused(request, error)
        except UserError as error:
            answer = failed(str(error))
        self.socket.answer(waiting.address, request, answer)
        return True

    def _refused(self, request: Message, error: BaseException) -> Message:
        self.socket.refuse(error)
        why = str(error) if isinstance(error, (Malformed, ValueError)) else repr(error)
        return failed(f"server {self.seat.rank} refused {request.verb.name} of worker {request.rank}: {why}")

    def _once(self, request: Message) -> Message:
        """A request that is not done again when its copy comes late."""
        this = request.incarnation, request.number
        if this <= self.done_once.get(request.rank, (0, 0)):
            return Message(Verb.DONE, clock=self._version())
        answer = self.verbs[request.verb](request)
        self.done_once[request.rank] = this
        return answer

    def _drop_waiting(self, rank: int, why: str) -> None:
        """Requests of a life that is over wait no longer."""
        for waiting in [w for w in self.waiting if w.is_of(rank)]:
            self.waiting.remove(waiting)
            self.socket.answer(waiting.address, waiting.request, failed(why, fenced=True))

    def try_again(self) -> None:
        """Everything that waits, in the order in which it came; answering one may free another."""
        moved = True
        while moved:
            moved = False
            for waiting in list(self.waiting):
                if self._try(waiting):
                    self.waiting.remove(waiting)
                    moved = True

    def look_after(self) -> None:
        """Who is silent is lost; who has waited too long is told for whom."""
        for rank in self.members.silent():
            self.lose(rank, f"nothing was heard of it for {self.members.lost_after_s:g} s")
        for rank in self.members.present():
            if self.seat.store is not None and self.seat.store.check([f"lost/worker/{rank}"]):
                self.lose(rank, "its process ended")
        patience, now = float(self.strategy["timeout_s"]), time.monotonic()
        for waiting in [w for w in self.waiting if now - w.since > patience]:
            self.waiting.remove(waiting)
            try:
                self._names_the_missing(waiting, patience)
            except NONSENSE as error:
                self.socket.answer(waiting.address, waiting.request, failed(repr(error)))
            except NotYet as missing:
                why = _not_arrived(workers(missing.ranks) or f"server {self.seat.rank}", missing.what, patience)
                self.socket.answer(waiting.address, waiting.request, failed(why))

    def _names_the_missing(self, waiting: Waiting, patience: float) -> None:
        answer = self.verbs[waiting.request.verb](waiting.request)
        self.socket.answer(waiting.address, waiting.request, answer)

    def lose(self, rank: int, why: str) -> None:
        """A worker is gone: nothing more is taken from it, its work goes to others; a sync run may have to stop."""
        print(f"worker {rank} is lost: {why}", flush=True)
        self.members.lose(rank, why)
        if self.seat.store is not None:
            self.seat.store.set(f"fenced/worker/{rank}", why)  # its launcher ends it when nothing else runs
        self.leases.lose(rank)
        if isinstance(self.rule, Sync) and self.strategy["on_lost_worker"] == "stop":
            for waiting in self.waiting:
                self.socket.answer(waiting.address, waiting.request, failed(f"worker {rank} was lost: {why}"))
            self.waiting.clear()
            raise RunFailed(f"worker {rank} was lost: {why} (strategy.on_lost_worker=stop)")
        self._drop_waiting(rank, f"worker {rank} was declared lost: {why}")
        self._changed()

    def _changed(self) -> None:
        if self.rule is not None:
            self.rule.changed()
        self.try_again()

    def hello(self, message: Message) -> Message:
        """A worker comes: its incarnation, its pushes that are applied, the longest frame that is taken."""
        before = self.members.all[message.rank].incarnation
        if message.sequence in self.members.all[message.rank].lives[:-1]:
            return failed(f"worker {message.rank} was started again", fenced=True)
        member = self.members.hello(message.rank, message.sequence)
        if member.incarnation > before:
            if before:
                self._drop_waiting(message.rank, f"worker {message.rank} was started again")
                self.leases.lose(message.rank)
                for table in self.shard.tables.values() if self.shard and isinstance(self.rule, Geo) else ():
                    table.forget(message.rank)
            print(f"worker {message.rank} has come, life {member.incarnation}, {member.watermark.done} pushes done", flush=True)  # fmt: skip
        limit = Record(Kind.NUMBERS, np.array([self.socket.most_bytes, member.watermark.greatest], dtype=np.float64))
        return Message(Verb.DONE, incarnation=member.incarnation, sequence=member.watermark.done, clock=self._version(), records=[limit])  # fmt: skip

    def start(self, message: Message) -> Message:
        """The first worker's parameters, or saved ones, become the start. Rows may follow in further messages."""
        told = message.mapping()
        if message.rank != 0:
            raise Malformed("the start is worker 0's to make")
        if self.ready:  # it was started again; the others are under way
            return Message(Verb.DONE, clock=self._version())
        last = bool(told["last"])
        if self.shard is None:
            try:
                self._begin(told, message)
            except BaseException:
                self.shard = self.rule = None
                raise
        elif not self.strategy["load_from"]:
            for number, (ids, values) in self._rows(message).items():
                self.shard.tables[number].assign(ids, values)
        self.ready = last
        return Message(Verb.DONE, clock=self._version())

    def _begin(self, told: Mapping[str, Any], message: Message) -> None:
        layout = Layout.parsed(told)
        if layout.dtype not in ("float32", "float64"):
            raise Malformed(f"parameters of {layout.dtype}")
        array = message.need(Kind.DENSE)
        if array.shape != (layout.dense,):
            raise Malformed(f"{array.shape} dense values for {layout.dense}")
        self._open(layout)
        assert self.shard is not None
        if folder := self.strategy["load_from"]:
            self._load([(part, part.meta) for part in snapshot.read(Path(folder), verify=False).parts])
        else:
            self.shard.vector.copy_(decode(array, message.first(Kind.SCALES), self.shard.dtype))

    def _open(self, layout: Layout) -> None:
        mode = locate(self.strategy["_target_"]).mode
        per_step = self.size if mode in ("async", "ssp") else 1
        geo = self.size if mode == "geo" else 0
        self.layout = layout
        self.shard = Shard(self.config, self.plan, self.seat.rank, self.plan["roles"]["server"], layout, per_step, geo)
        self.rule = RULES[mode](self.shard, self.members, self.strategy)

    def _version(self) -> int:
        return self.shard.version if self.shard is not None else 0

    def _opened(self) -> tuple[Shard, Rule]:
        if self.shard is None or self.rule is None or not self.ready:
            raise NotYet([self.members.present()[0]] if self.members.present() else [], "the equal start")
        return self.shard, self.rule

    def pull(self, message: Message) -> Message:
        """Parameters: the dense vector, and rows by their ids, once they are as new as the pull asks for."""
        shard, rule = self._opened()
        if not rule.may_pull(message.clock):
            raise NotYet(rule.awaited(message.clock), "the update of the parameters")
        wanted = {r.table: self._ids(r.table, r.array) for r in message.records if r.kind == Kind.IDS}
        self.count["pulls"] += 1
        form = {"int8": "bf16"}.get(self.strategy["wire"], self.strategy["wire"])
        records, rows, dense = [], {}, None
        if message.flags & WANTS_DENSE and len(shard.vector):
            dense = shard.vector.detach().clone()
            records += encode(dense, Kind.DENSE, 0, form)
        for number, ids in wanted.items():
            values = shard.tables[number].pull(ids, create=bool(message.flags & CREATES), clock=self.age)
            if message.flags & HOLDS:
                shard.tables[number].hold(message.rank, ids)
            records += encode(values, Kind.ROWS, number, form)
            rows[number] = ids, values
        if message.flags & CREATES:
            rule.pulled(message.rank, dense, rows)
        return Message(Verb.DONE, clock=shard.version, records=records)

    def push(self, message: Message) -> Message:
        """Gradients or differences, applied once however often they come."""
        shard, rule = self._opened()
        member = self.members.all[message.rank]
        work = message.first(Kind.WORK)
        work = np.empty((0, 4), dtype=np.int64) if work is None else work
        if work.ndim != 2 or work.shape[1] != 4 or work.dtype != np.int64 or len(work) > MOST_WORK:
            raise Malformed(f"work of {work.shape}")
        numbers = self._numbers(message)
        if not member.watermark.seen(message.sequence):
            push = self._push(message, numbers)
            member.watermark.mark(message.sequence)
            if message.flags and isinstance(rule, Ssp):
                self._rest_or_wake(rule, message)
            elif self.progress.covered(work):
                self.count["duplicates"] += 1
            elif not message.flags:
                rule.push(push)
                self.count["pushes"] += 1
            self.progress.mark(work)
            self.work_moved = time.monotonic() if len(work) else self.work_moved
        elif not any(w.request is message for w in self.waiting):
            self.count["duplicates"] += 1
        answer = Message(Verb.DONE, clock=shard.version)
        if isinstance(rule, Sync) and rule.clip is not None:
            norm = rule.norm(message.clock - 1)
            if norm is None and shard.version < message.clock:
                raise NotYet(rule.awaited(0), "the update of the parameters")
            answer.records.append(Record(Kind.NUMBERS, np.array([norm or 0.0])))
        if isinstance(rule, Ssp) and message.flags & WAKES:
            answer.clock = rule.clocks[message.rank]
        if isinstance(rule, Geo):
            answer.records += self._news(shard, message)
        return answer

    def _rest_or_wake(self, rule: Ssp, message: Message) -> None:
        if message.flags & RESTS:
            rule.rest(message.rank)
        else:
            rule.wake(message.rank, message.clock)

    def _news(self, shard: Shard, message: Message) -> list[Record]:
        """Geo: the dense parameters as they are now, and the rows that others changed since the worker's cursor.

        The cursor is the version of the last answer that the worker *has*: an answer that was lost loses no row.
        """
        cursor = int(message.need(Kind.NUMBERS)[0])
        records = encode(shard.vector.detach().clone(), Kind.DENSE, 0) if len(shard.vector) else []
        for number, table in shard.tables.items():
            ids, values = table.refresh(message.rank, cursor)
            records += [Record(Kind.IDS, ids, number), *encode(values, Kind.ROWS, number)]
        return records

    def _numbers(self, message: Message) -> tuple[int, float, int, int]:
        """Of a push: version of the parameters it was computed with (geo: of the last answer), samples, age of rows,
        gradients added up in it."""
        numbers = message.need(Kind.NUMBERS)
        if numbers.dtype != np.float64 or numbers.ndim != 1 or len(numbers) < 3 or not np.isfinite(numbers).all():
            raise Malformed("PUSH without its numbers")
        basis, samples, age = int(numbers[0]), float(numbers[1]), int(numbers[2])
        if not 0 <= basis < LARGEST_NUMBER or not 0 <= age < LARGEST_NUMBER or not 0 <= samples < LARGEST_NUMBER:
            raise Malformed(f"PUSH with the numbers {basis}, {samples:g}, {age}")
        merged = int(numbers[3]) if len(numbers) > 3 else 1
        if not 1 <= merged <= self.strategy.get("max_merge_var_num", 1):
            raise Malformed(f"PUSH of {merged} gradients")
        return basis, samples, age, merged

    def _push(self, message: Message, numbers: tuple[int, float, int, int]) -> Push:
        shard = self.shard
        assert shard is not None
        array = message.first(Kind.DENSE)
        dense = None if array is None else decode(array, message.first(Kind.SCALES, 0), shard.dtype)
        if dense is not None and dense.shape != shard.vector.shape:
            raise Malformed(f"{len(dense)} dense values for {len(shard.vector)}")
        basis, samples, age, merged = numbers
        rows = self._rows(message)
        self._grow_older(age)
        return Push(message.rank, samples, dense, rows, basis, message.clock, self.age, merged)

    def _grow_older(self, told: int) -> None:
        """The age is the greatest that any worker has told: what a slow one touches is touched now."""
        assert self.shard is not None
        if not self.age and self.strategy["evict_by"] == "event_time":
            for table in self.shard.tables.values():
                table.count_from(told)
        self.age = max(self.age, told + self.age_before)

    def _ids(self, number: int, ids: np.ndarray) -> np.ndarray:
        """Ids of a table, checked: ascending, not negative, in range, and at home here."""
        shard = self.shard
        assert shard is not None
        table = shard.tables.get(number)
        if table is None or ids.dtype != np.int64 or ids.ndim != 1:
            raise Malformed(f"ids of table {number}")
        if len(ids) and (ids[0] < 0 or not (ids[1:] > ids[:-1]).all()):
            raise Malformed(f"ids of table {table.name} are not ascending")
        if len(ids) and table.num_rows is not None and ids[-1] >= table.num_rows:
            raise Malformed(f"table {table.name} has rows 0..{table.num_rows - 1}, not {ids[-1]}")
        if shard.servers > 1 and not shard.mine(number, ids).all():
            raise Malformed(f"rows of table {table.name} that another server keeps")
        return ids

    def _rows(self, message: Message) -> Rows:
        shard = self.shard
        assert shard is not None
        rows: Rows = {}
        for record in message.records:
            if record.kind != Kind.ROWS:
                continue
            ids = self._ids(record.table, message.need(Kind.IDS, record.table))
            values = decode(record.array, message.first(Kind.SCALES, record.table), shard.dtype)
            if values.shape != (len(ids), shard.tables[record.table].dim):
                raise Malformed(f"{tuple(values.shape)} values for {len(ids)} rows")
            rows[record.table] = ids, values
        return rows

    def commit(self, message: Message) -> Message:
        """Two-phase clipping: the norm over all servers is known, the step can be taken."""
        shard, rule = self._opened()
        norm = message.need(Kind.NUMBERS)
        if norm.dtype != np.float64 or norm.shape != (1,):
            raise Malformed("COMMIT without its norm")
        rule.commit(message.clock, float(norm[0]))
        return Message(Verb.DONE, clock=shard.version)

    def meet(self, message: Message) -> Message:
        """A sum over the present workers; ``clock`` is the number of the meeting."""
        values = message.need(Kind.NUMBERS)
        if values.dtype != np.float64 or values.ndim != 1:
            raise Malformed("values of a meeting are float64")
        self.meetings.arrive(message.clock, message.rank, values)
        total = self.meetings.total(message.clock)
        if total is None:
            raise NotYet(self.meetings.missing(message.clock), "a sum over the workers")
        present = np.array(self.meetings.open[message.clock].present, dtype=np.int64)
        return Message(Verb.DONE, clock=message.clock, records=[Record(Kind.NUMBERS, total), Record(Kind.IDS, present)])

    def lease(self, message: Message) -> Message:
        """A block of the epoch's work. A copy of a request gets what is remembered: its answer goes nowhere."""
        rank, life, number = message.rank, message.incarnation, message.number
        if (before := self.leased.get(rank)) and before[:2] >= (life, number):
            return before[2]
        told = message.mapping()
        done = [int(b) for b in told["done"]]
        answer = self.leases.ask(rank, int(told["epoch"]), int(told["blocks"]), done)
        if answer is not None or done:
            self.work_moved = time.monotonic()
        if answer is None:  # the worker asks again; a block may take long, as long as its holder's pushes come
            patience = float(self.strategy["timeout_s"])
            if time.monotonic() - self.work_moved > patience:
                return failed(_not_arrived(workers(self.leases.holders()), "the end of a block of work", patience))
            answer = Answer()
        fence = [] if answer.before < 0 else [answer.before, self.members.all[answer.before].fenced]
        reply = Message(Verb.DONE, records=[text({"block": answer.block, "fence": fence, "over": answer.over})])
        self.leased[rank] = life, number, reply
        return reply

    def fence(self, message: Message) -> Message:
        """A worker takes over a block: nothing more is taken from the one before; how far that one's pushes got here."""
        told = message.mapping()
        rank, life, epoch, block = (int(told[k]) for k in ("rank", "incarnation", "epoch", "block"))
        if not 0 <= rank < self.size:
            raise Malformed(f"there is no worker {rank}")
        member = self.members.all[rank]
        if member.incarnation <= life and not member.lost:
            self.lose(rank, "another worker has taken over its work")
        done = self.progress.of(epoch, block)
        return Message(Verb.DONE, records=[Record(Kind.NUMBERS, np.array([float(done)]))])

    def everything(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name; numbers, watermarks and progress among them."""
        shard, _ = self._opened()
        tensors, meta = shard.state()
        marks = {str(m.rank): [m.watermark.done, sorted(m.watermark.above)] for m in self.members.all}
        progress = {"epoch": self.progress.epoch, "next": list(self.progress.next.items())}
        return tensors, {**meta, "watermarks": marks, "progress": progress, **self._ages()}

    def _ages(self) -> dict[str, Any]:
        return {"age": self.age, "age_before": self.age_before, "evict_by": self.strategy["evict_by"]}

    def _load(self, parts: list[tuple[Any, Mapping[str, Any]]]) -> None:
        """Everything, or nothing where a part does not fit. Workers of another run count their pushes from 1 again."""
        before = self.shard, self.rule
        try:
            self._open(self.layout)
            assert self.shard is not None and self.rule is not None
            self.shard.load(parts)
            age = max(int(meta["age"]) for _, meta in parts)
        except BaseException:
            self.shard, self.rule = before
            raise
        self.age, self.age_before = age, age if self.strategy["evict_by"] == "steps" else 0

    def save(self, message: Message) -> Message:
        """Write this server's part of the persistables, into the run's folder and nowhere else."""
        folder = Path(message.mapping()["folder"])
        if not folder.resolve().is_relative_to(self.run_dir):
            raise Malformed(f"SAVE to {folder}, which is not in the run's folder")
        tensors, meta = self.everything()
        shard, _ = self._opened()
        kept = {t.name: {"dim": t.dim, "dtype": self.layout.dtype, "kernel": t.kernel.name, "num_rows": t.num_rows, "rows": len(t)} for t in shard.tables.values()}  # fmt: skip
        meta |= {"mode": locate(self.strategy["_target_"]).mode, "optimizer": kept_by(self.config["optimizer"])}
        meta |= {"dtype": self.layout.dtype, "step": shard.step}
        meta |= {"tables": kept, "dense": [{"name": n, "start": a, "stop": b} for n, a, b in self.layout.pieces]}
        began = time.monotonic()
        snapshot.write_part(folder, self.seat.rank, tensors, meta)
        size = sum(t.nbytes for t in tensors.values())
        print(f"saved {size / 1e6:.1f} MB in {time.monotonic() - began:.2f} s", flush=True)
        return Message(Verb.DONE)

    def shrink(self, message: Message) -> Message:
        """Drop rows that nobody has touched for so long, in steps or in the data's own time."""
        shard, _ = self._opened()
        now = self.age
        age = int(message.mapping()["age"])
        if age < 1:
            raise Malformed(f"age {age}")
        older = now - age
        removed = sum(table.shrink(older) for table in shard.tables.values()) if older > 0 else 0
        return Message(Verb.DONE, records=[text({"removed": removed})])

    def rate(self, message: Message) -> Message:
        """The factor of a schedule that goes by validations, which workers see and servers do not."""
        shard, _ = self._opened()
        scale = float(message.mapping()["scale"])
        if not isinstance(shard.schedule, Plateau) or not 0.0 <= scale <= 1.0:
            raise Malformed(f"a rate of {scale}")
        shard.schedule.scale = scale
        return Message(Verb.DONE, clock=shard.version)

    def stats(self, message: Message) -> Message:
        """What has been done so far."""
        return Message(Verb.DONE, records=[text(self.statistics())])

    def bye(self, message: Message) -> Message:
        """A worker has finished."""
        member = self.members.all[message.rank]
        if member.present:
            member.left = True
            self.leases.lose(message.rank)
            self._changed()
        return Message(Verb.DONE)

    def statistics(self) -> dict[str, Any]:
        """Counts since the start."""
        tables = {t.name: t.memory() | {"dropped": t.dropped} for t in self.shard.tables.values()} if self.shard else {}
        return {
            "server": self.seat.rank,
            "endpoint": self.socket.endpoint,
            "seconds": round(time.monotonic() - self.started, 3),
            "version": self._version(),
            "step": self.shard.step if self.shard else 0,
            "age": self.age,
            "scale": getattr(self.shard and self.shard.schedule, "scale", 1.0),
            **self.count,
            "bytes_in": self.socket.bytes_in,
            "bytes_out": self.socket.bytes_out,
            "waiting": len(self.waiting),
            "refused": self.socket.malformed,
            "turned_away": self.socket.turned_away,
            "rows": sum(int(t["rows"]) for t in tables.values()),
            "tables": tables,
            "staleness": {str(k): v for k, v in sorted(self.rule.staleness.items())} if self.rule else {},
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


def failed(why: str, fenced: bool = False) -> Message:
    """The answer to a request that cannot be; ``fenced``: because its worker does not take part any more."""
    return Message(Verb.FAILED, records=[text({"why": why, "fenced": fenced})])


def _not_arrived(names: str, what: str, patience_s: float) -> str:
    return f"{names} did not arrive at {what} within {patience_s:g} s (strategy.timeout_s)"
