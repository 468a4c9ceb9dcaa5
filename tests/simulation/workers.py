"""A worker's own strategy classes, as a process of the simulated world: a greenlet that waits in the middle of real
code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from tests.notes import Notes
from tests.simulation.boards import FarBoard, FarStore, Store
from tests.simulation.checkpoints import Checkpoints, Part
from tests.simulation.scenario import Scenario
from tests.simulation.servers import RUN_DIR, copied
from tests.simulation.stage import STAGE
from tests.simulation.waits import PARTS_S, WRITES
from tests.simulation.world import Process, Violation, World
from trainer.data.feed import Batch, Feed
from trainer.errors import RunFailed
from trainer.host.notes_board import NoNote
from trainer.models.embedding_tables import RowEmbedding
from trainer.optim.groups import Rate
from trainer.optim.sparse import DenseAndSparse, SparseRule, sparse_optimizer
from trainer.optim.updater import Updater
from trainer.strategies.contract import Lease
from trainer.strategies.pserver.protocol.messages import SAVES, STOPS, Message, Verb
from trainer.strategies.pserver.worker import async_and_ssp, connections, geo, sync
from trainer.strategies.pserver.worker import client as client_module
from trainer.strategies.pserver.worker.export import save_checkpoint
from trainer.strategies.pserver.worker.remote_model import Looked
from trainer.strategies.pserver.worker.worker import PserverWorker
from trainer.strategies.seat import Life, Others, Seat
from trainer.worker.coming_back import NOBODY, Missed, TooLate, let_in, wait_for
from trainer.worker.returned import NOT_WRITTEN, Returned

KINDS: dict[str, type[PserverWorker]] = {
    "async": async_and_ssp.PserverAsync,
    "ssp": async_and_ssp.PserverSsp,
    "geo": geo.PserverGeo,
    "sync": sync.PserverSync,
}
SHARED = 0
"""The row that every batch touches; each has one of its own as well."""
RUN = Path(RUN_DIR) / "checkpoints"
KILLED = "killed"
LEAVES = Verb.BYE, False
"""The message of a worker that dies as it leaves."""


@cache
def step(number: int) -> Path:
    """The folder of a checkpoint."""
    return RUN / f"step-{number}"


class Model(nn.Module):
    """Vectors, one per server if there are not more, with an element for each piece of work, and if wanted a table with
    a row for each."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        servers, pieces = scenario.vectors or scenario.servers, scenario.batches * scenario.epochs
        self.vectors = [f"vector{server}" for server in range(servers)]
        for name in self.vectors:
            self.register_parameter(name, nn.Parameter(torch.from_numpy(np.zeros(pieces))))
        if scenario.buffers:
            self.register_buffer("seen", torch.zeros(1))
        if scenario.bulky:
            zeros = torch.zeros((pieces + 1, 1), dtype=torch.float64)
            self.rows = nn.Embedding(pieces + 1, 1, sparse=True, _weight=zeros)
        elif scenario.table:
            self.rows = RowEmbedding(pieces + 1, 1, "zeros", 0.0)
            self.rows.to(torch.float64)


class Updaters:
    """Makes SGD with a rate of 1: a gradient of -1 adds 1."""

    def __call__(self, module: nn.Module) -> Updater:
        if not isinstance(module, Model):
            return Updater(_never_steps(), _constant, None, lr=1.0)
        optimizer: Any = torch.optim.SGD([getattr(module, name) for name in module.vectors], lr=1.0, foreach=False)
        if hasattr(module, "rows"):
            rule = SparseRule("sgd", 1.0, {})
            optimizer = DenseAndSparse(optimizer, sparse_optimizer(rule, [module.rows.weight], [1.0]), rule)
        return Updater(optimizer, _constant, None, lr=1.0)

    def rates(self, module: Model) -> dict[str, Rate]:
        """All alike."""
        return dict.fromkeys([*module.vectors, "rows.weight"], ALIKE)


ALIKE = Rate(1.0, False)


def _constant(step: int) -> float:
    return 1.0


@cache
def _never_steps() -> torch.optim.Optimizer:
    """Of the workers whose servers have the optimizer: they ask it for the schedule alone."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


class Ways:
    """The connections of a simulated worker."""

    def __init__(self, worker: SimulatedWorker, count: int) -> None:
        self.worker, self.count = worker, count
        self.now, self.send = worker.clock, worker.send
        self.far = bool(worker.scenario.places)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def receive(self) -> list[Message]:
        came, self.worker.inbox = self.worker.inbox, []
        return came

    def saving(self, servers: Iterable[int]) -> set[int]:
        found = connections.saving(self.worker.board, servers)  # type: ignore[arg-type]
        self.worker.found_saving += bool(found)
        return found

    def wait(self, seconds: float) -> None:
        if not self.worker.inbox:
            self.worker.pause(max(0.001, seconds), for_messages=True)

    def sleep(self, seconds: float) -> None:
        self.worker.pause(seconds, for_messages=False)

    def close(self) -> None:
        pass


class Blocks:
    """Leased work, as a feed reads it: a batch has no samples but its number."""

    def __init__(self, scenario: Scenario, hand: Callable[[int, int], Iterator[Lease | None]]) -> None:
        self.scenario, self.hand = scenario, hand

    def leases(self, epoch: int) -> Iterator[Lease | None]:
        return self.hand(epoch, self.scenario.blocks)

    def read(self, epoch: int, lease: Lease) -> Iterator[tuple[Any, torch.Tensor]]:
        first = epoch * self.scenario.batches + lease.block * self.scenario.block
        for number in range(lease.start, self.scenario.block):
            yield _inputs(first + number, self.scenario.timed), _label()


@cache
def _label() -> torch.Tensor:
    return torch.zeros(1)


@cache
def _inputs(piece: int, timed: bool) -> dict[str, Any]:
    inputs = {"ids": torch.tensor([SHARED, piece + 1]), "piece": piece}
    return inputs | {"time": torch.tensor([piece + 1])} if timed else inputs


class SimulatedWorker(Process):
    """A worker process.

    Args:
        board: the run's. saved: its checkpoints. begins: the part of one that it goes on from.
        send: takes (server, a request, which process sends it).
        ended: told how the process has ended: empty for well, or why not, and whether that ends the run.
        settled: told when all differences of the training are exchanged.
        number: so many processes of this rank have died.
        place: the board's store, and the worker's host; None: all are on one host.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        scenario: Scenario,
        board: Notes | FarBoard,
        saved: Checkpoints,
        send: Callable[[int, Message, bytes], None],
        ended: Callable[[int, str, bool], None],
        settled: Callable[[PserverWorker], None],
        number: int = 0,
        begins: Part | None = None,
        place: tuple[Store, int] | None = None,
    ) -> None:
        self.settled, self.begins = settled, begins
        super().__init__(world, f"worker {rank}")
        self.saved, self.number, self.address = saved, number, b"%d.%d" % (rank, number)
        self.board = board if place is None else FarBoard(FarStore(place[0], place[1], self._real_time, self._waits))
        self.notes = self.board.under("checkpoint")
        self.returned = Returned(self.notes)  # type: ignore[arg-type]
        self.life = self.epoch = self.update = self.asked = self.last_stop = self.saved_last = 0
        self.rank, self.scenario, self.send_away, self.tell_end = rank, scenario, send, ended
        self.inbox: list[Message] = []
        self.waits = self.found_saving = 0
        self.for_messages = False
        self.waiting_since: float | None = None
        self.computed: list[int] = []
        self.target: int | None = None
        """In sync: all stop after that update."""
        self.writing = False
        """Its part, and with the first one all of a checkpoint, is being written."""
        self.missed = False
        """The checkpoint at which it was to come back is not there."""
        self.doomed: tuple[Verb, bool] | None = None
        """It is killed when only some servers have its next message of this kind; of those of meetings: at a stop, or
        else."""
        self.strategy: PserverWorker | None = None
        self.run = greenlet(self._main)
        world.after((10.0 * world.random.random() ** 2 if number else 0.05) * world.random.random(), self._begin)

    # --- being a process -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.dead:
            self.when_it_goes_on(self._switch)

    def _switch(self) -> None:
        if not (self.dead or self.ended):
            if self.stopped:
                self.world.at(self.stopped_until, self._switch)
            else:
                self.run.switch()

    def pause(self, seconds: float, for_messages: bool) -> None:
        """Let others do something, for so long or until a message comes."""
        self.waits += 1
        self.for_messages = for_messages
        number = self.waits
        self.world.after(seconds, self._wake, number)
        if torch.is_grad_enabled():  # of the thread, which all simulated processes share
            self.run.parent.switch()
            return
        with torch.enable_grad():
            self.run.parent.switch()

    def _wake(self, number: int) -> None:
        if number == self.waits and not (self.dead or self.ended):
            if self.stopped:
                self.world.at(self.stopped_until, self._wake, number)
                return
            self.waits += 1
            self.run.switch()

    def _real_time(self) -> float:
        return self.world.now

    def _waits(self, seconds: float) -> None:
        """For the board. A thread that writes a checkpoint waits by itself, and is not awaited."""
        if getcurrent() is self.run:
            self.pause(seconds, for_messages=False)

    def jump(self, seconds: float) -> None:
        super().jump(seconds)
        if self.for_messages:  # a poll ends by the clock that has jumped
            self.world.after(0.0, self._wake, self.waits)

    def deliver(self, answer: Message) -> None:
        """An answer has arrived."""
        if not (self.dead or self.ended):
            self.inbox.append(answer)
            if self.for_messages:
                self._wake(self.waits)

    def send(self, server: int, request: Message) -> bool:
        """A request goes its way: not in frames but as it is, with its buffers as they are now."""
        if self.dead or (self.doomed and self._tears(request)):
            return True
        if self.world.tracing:
            work = [w for r in request.records if r.kind == 7 for w in r.array.tolist()]
            self.world.say(
                f"{self.name} asks server {server}: {request.verb.name} {request.number}, sequence "
                f"{request.sequence}, clock {request.clock}, flags {request.flags} {work or ''}"
            )
        self.send_away(server, copied(request), self.address)
        return True

    def _tears(self, request: Message) -> bool:
        """Whether this message never leaves; its worker soon is no more."""
        if self.doomed != (request.verb, request.verb == Verb.MEET and bool(request.flags & STOPS)):
            return False
        self.world.after((0.02 if request.verb == Verb.PUSH else 0.5) * self.world.random.random(), self.kill)
        return self.world.random.random() < (0.5 if request.verb == Verb.PUSH else 0.1)

    def kill(self) -> None:
        """SIGKILL: it does nothing more, says nothing more."""
        if self.dead or self.ended:
            return
        self.world.say(f"{self.name} is killed")
        self.dead = True
        if self.run:
            self.run.throw()
        self.world.after(0.3 * self.world.random.random(), self.tell_end, self.rank, KILLED, False)

    def _main(self) -> None:
        try:
            self._train()
            why, fatal = "", False
        except GreenletExit:
            return
        except RunFailed as error:
            why, fatal, self.missed = f"{error}", getattr(error, "ends_run", True), isinstance(error, Missed)
        except NoNote as error:  # its launcher misses the board as well
            why, fatal = f"{error}", False
        if not self.dead:
            self.ended = True
            self.world.say(f"{self.name} ends: {why or 'well'}")
            self.world.after(0.3 * self.world.random.random(), self.tell_end, self.rank, why, fatal)

    # --- what it does ----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        scenario = self.scenario
        try:
            strategy = self.strategy = self._strategy()
            strategy.setup(Model(scenario), Updaters())  # type: ignore[arg-type]
            strategy.model.train()
            first = self._come_back(strategy) if self.number else self._begin_at(strategy)
            if scenario.mode != "sync" and (scenario.returns or scenario.ends or scenario.goes_back or scenario.places):
                strategy.check_checkpoint = self._look
            for epoch in range(first, scenario.epochs):
                self.epoch = epoch
                self._epoch(strategy, epoch)
                if scenario.validates or epoch + 1 == scenario.epochs:
                    self._validate(strategy, last=epoch + 1 == scenario.epochs)
                else:
                    strategy.meet()
                    self._stand_still(strategy, epoch + 1)
                self.update = 0
            self._wait_for_the_write()
            if scenario.saves:
                self._save(strategy)
                strategy.persist(RUN)
        except BaseException:
            if self.strategy is not None:
                self.strategy.failed = True
            raise
        finally:
            if self.strategy is not None and not self.dead:
                self.strategy.close()

    def _validate(self, strategy: PserverWorker, last: bool) -> None:
        def shared(index: int, count: int) -> None:
            if last:
                self.settled(strategy)
            if self.scenario.evaluates:
                self._evaluate(strategy)
            self._sum(strategy, count)

        if self.scenario.shares:
            strategy.agree(shared, strategy.synchronize)
        else:
            strategy.synchronize()
            shared(*strategy.members())

    def _strategy(self) -> PserverWorker:
        kind, seat = KINDS[self.scenario.mode], _seat(self.rank, self.scenario.workers, self.scenario.servers)
        self.life = client_module.new_life()
        self.seat = seat = replace(seat, store=self.board, life=Life(self.life, returns=self.number > 0))
        strategy = kind.__new__(kind)
        ways = Ways(self, self.scenario.servers)
        strategy.connections = lambda: ways  # type: ignore[method-assign]
        told = {key: value for key, value in self.scenario.options.items() if key not in ("count", "probability")}
        strategy.__init__(told, seat)  # type: ignore[misc]
        return strategy

    def _epoch(self, strategy: PserverWorker, epoch: int) -> None:
        pace, random = self.scenario.pace[self.rank], self.world.random
        for samples, batches in self._feed(strategy, epoch):
            for batch in batches:
                strategy.prepare(batch)
                self.pause(pace * (0.5 + random.random()), for_messages=False)
                self._backward(strategy, batch)
            strategy.step(samples)
            self.update += 1
            if self.scenario.mode == "sync" and self.scenario.stops:
                self._save_in_step(strategy)
            elif strategy.check_checkpoint is not None:
                strategy.check_checkpoint(True)

    # --- stops, as worker/checkpoints.py and worker/coming_back.py -------------------------------------------------

    def _look(self, decides: bool) -> None:
        """The first lets in who has come back and says when all stop; all look whether it has."""
        strategy, stop = self.strategy, f"stop/{self.asked}"
        assert strategy is not None
        if decides and strategy.leads():
            due = self.scenario.stops and len(self.computed) - self.last_stop >= self.scenario.stops
            if (due or self.returned.waits()) and not self.writing:
                self.notes.set(stop, f"0 {strategy.meetings}")
                self.returned.let_in(strategy, self.asked)
        if self.notes.check([stop]) and (decides or strategy.meetings > int(self.notes.get(stop).split()[1])):
            self._stand_still(strategy, self.epoch)
            self.asked += 1

    def _save_in_step(self, strategy: PserverWorker) -> None:
        """The first says after which update all stop; others look whether it has."""
        self.pause(0.5 * self.world.random.random() * self.scenario.pace[self.rank], for_messages=False)
        note = f"after/{self.asked}"
        if self.target is None:
            if strategy.members()[0] == 0:
                if strategy.steps - self.last_stop >= self.scenario.stops and not self.writing:
                    self.target = strategy.next_meeting(strategy.steps)
                    self.notes.set(note, f"{self.target} 0")
            elif self.notes.check([note]):
                self.target = int(self.notes.get(note).split()[0])
        if strategy.steps == self.target:
            self._stand_still(strategy, self.epoch)
            self.asked, self.target, self.last_stop = self.asked + 1, None, strategy.steps

    def _stand_still(self, strategy: PserverWorker, epoch: int) -> None:
        """A checkpoint is written: soon, or never. All go on from it in that epoch."""
        self._wait_for_the_write()
        in_step = self.scenario.mode == "sync"
        number = strategy.halt(strategy.steps if in_step else max(len(self.computed), self.saved_last + 1))
        share = strategy.save(step(number))
        self.world.injected["stop of all"] += 1
        self.last_stop, self.saved_last, self.world.moved = len(self.computed), number, self.world.now
        update = self.update if epoch == self.epoch else 0
        how = Part.of if self.scenario.ends or self.scenario.goes_back else Part.later
        part = how(strategy, epoch, update, share)
        self.writing = self.scenario.background
        self.world.after(3.0 * self.world.random.random() ** 3, self._written, number, part)

    def _wait_for_the_write(self) -> None:
        """At most one write is under way."""
        while self.writing:
            self.pause(0.5, for_messages=False)

    def _written(self, number: int, part: Part) -> None:
        """Its part is written; that of the first one completes the checkpoint, when all servers' parts are there."""
        if self.dead:
            return
        if part.share.workers is None or part.share.workers[0] != self.rank:
            self.writing = False
            self.saved.add(number, self.rank, part)
        elif self.world.random.random() < 0.05:
            self._not_written(number, "the disk is full")
        else:
            self._complete(number, part)

    def _complete(self, number: int, part: Part, before: Sequence[int] = (), until: float = 0.0) -> None:
        """As checkpoint/writer.py: parts that are missing are waited for, as long as one after the other comes."""
        if self.dead:
            return
        disks, folder, servers = STAGE.disks, step(number), self.scenario.servers
        missing = [server for server in range(servers) if not disks.is_written(folder, server)]
        if failed := [why for server in missing if (why := disks.failures.get((str(folder), server)))]:
            self._not_written(number, failed[0])
        elif missing:
            if missing != before:
                until = self.world.now + PARTS_S + WRITES * self.scenario.disk_s
            if self.world.now > until:
                self._not_written(number, f"parts of servers {missing} were not written")
            else:
                self.world.after(0.2, self._complete, number, part, missing, until)
        else:
            disks.complete(folder, servers)
            self.writing = False
            self.saved.add(number, self.rank, part)

    def _not_written(self, number: int, why: str) -> None:
        self.world.injected["checkpoint given up"] += 1
        self.world.say(f"no checkpoint {number}: {why}")
        self.writing = False
        with suppress(NoNote):
            self.notes.set(NOT_WRITTEN.format(number), why)

    def _begin_at(self, strategy: PserverWorker) -> int:
        """Be what this worker was at the checkpoint, if there is one; returns the epoch."""
        if self.begins is None:
            return 0
        self.begins.put(strategy, RUN)
        self.update = self.begins.update
        return self.begins.epoch

    def _come_back(self, strategy: PserverWorker) -> int:
        """Wait to be let in; returns the epoch of the others."""

        def sleep(seconds: float) -> None:
            strategy.pause(6.0 * seconds)

        asked, meeting, stop = let_in(self.seat, sleep, self.clock)
        if (found := strategy.come_back((meeting, stop))) is None:
            raise TooLate(NOBODY)
        number, writer = found
        wait_for(lambda: number in self.saved.whole, self.seat, str(number), writer, sleep)
        part = self.saved.whole[number]
        strategy.load(RUN, part.share)
        self.asked, self.saved_last = asked + 1, number
        strategy.take_part()
        self.world.injected["takes part again"] += 1
        return part.epoch

    def _feed(self, strategy: PserverWorker, epoch: int) -> Iterator[tuple[int, Iterator[Batch]]]:
        feed = Feed.__new__(Feed)
        feed.merge, feed.average, feed.growth, feed.waited = self.scenario.merge, True, None, 0.0
        feed.denominator = feed.decoder = feed.idle = None
        feed.place = lambda inputs, labels: (inputs, labels)  # type: ignore[assignment]
        feed.expect = strategy.expect if self.scenario.table else None
        feed.work = Blocks(self.scenario, strategy.leases) if self.scenario.leased else None  # type: ignore[assignment]
        if feed.work is None:
            feed._split = self._split  # type: ignore[method-assign]
        return feed.updates(epoch, self.update)

    def _split(self, epoch: int, update: int) -> Iterator[Batch]:
        """The batches of this worker from an update on, where they are split beforehand."""
        merge, each = self.scenario.merge, self.scenario.each
        first = epoch * self.scenario.batches + self.rank * each
        for number in range(update * merge, each):
            inputs = _inputs(first + number, self.scenario.timed)
            yield Batch(inputs, _label(), 1, 1 / merge, (number + 1) % merge == 0, merge)

    def _backward(self, strategy: PserverWorker, batch: Batch) -> None:
        """A gradient of -1 for this piece at each server, and for its rows."""
        ids, piece = batch.inputs["ids"], batch.inputs["piece"]
        self.computed.append(piece)
        self.world.moved = self.world.now
        for parameter in strategy.dense.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.from_numpy(np.zeros(parameter.shape))
            parameter.grad.numpy()[piece] -= 1.0
        for table in strategy.remote:
            found, _, rows = table.look_up(table, ids)
            rows = rows.detach()
            rows.grad = torch.full_like(rows, -1.0)
            table.used.append(Looked(found, rows))

    def _sum(self, strategy: PserverWorker, workers: int) -> None:
        """As a validation does: a sum over those who take part, and perhaps those who were lost meanwhile; each once.

        Args:
            workers: among so many this one has divided the samples.
        """
        mine = torch.tensor([1.0, 2.0**self.rank, workers], dtype=torch.float64)
        count, bits, all_workers = (int(n) for n in strategy.all_reduce_sum(mine).tolist())
        if all_workers != workers * count:
            raise Violation(f"worker {self.rank} divides the validation among {workers}, and others among others")
        if bits.bit_count() != count or any(not bits >> rank & 1 for rank in strategy.present):
            raise Violation(f"worker {self.rank}: a sum over {strategy.present} is of {count}: {bits:b}")

    def _evaluate(self, strategy: PserverWorker) -> None:
        """Rows are looked up, and none is made: another worker may change them meanwhile, but never twice for one
        piece."""
        strategy.model.eval()
        for table in strategy.remote:
            pieces = torch.arange(1, self.scenario.batches + 1)
            once, _, rows = table.look_up(table, pieces)
            if len(once) != len(pieces) or float(rows.max()) > 1.000001:
                raise Violation(f"worker {self.rank} has looked up rows {rows[:, 0].tolist()}")
        strategy.model.train()

    def _save(self, strategy: PserverWorker) -> None:
        """A checkpoint when all is done; a second one where parts have to be fetched, which late messages must not
        harm."""
        for number in range(2 if any(self.scenario.hosts) else 1):

            def by_the_first(index: int, count: int, folder: Path = RUN / f"{number}") -> None:
                if index == 0:
                    save_checkpoint(strategy.client, folder, behind=not strategy.new)

            if number == 0:
                strategy._sum(np.zeros(1), SAVES)
            strategy.agree(by_the_first)


@cache
def _seat(rank: int, workers: int, servers: int) -> Seat:
    return Seat("worker", rank, workers, rank, workers, "cpu", None, others=Others(servers=servers))
