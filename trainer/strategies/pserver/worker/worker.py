"""The base of all parameter-server workers, in the order of their work; each subject has an object of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.schema import PserverStrategy
from trainer.host.transfers import on_its_way
from trainer.models.embedding_tables import dense_of, tables
from trainer.strategies.contract import Agreed, Lease, MakeUpdater, Share, Strategy
from trainer.strategies.pserver.protocol.messages import CREATES, SAVES, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.agreement import agree_on
from trainer.strategies.pserver.worker.ahead import Ahead
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.connections import connect
from trainer.strategies.pserver.worker.connections_contract import Connections
from trainer.strategies.pserver.worker.export import merged_tables, save_persistables
from trainer.strategies.pserver.worker.gauges import Gauges, ReadsStatistics
from trainer.strategies.pserver.worker.halting import Halting
from trainer.strategies.pserver.worker.held_blocks import HeldBlocks
from trainer.strategies.pserver.worker.initial_values import send_start
from trainer.strategies.pserver.worker.own_share import Own, Places, feedback_in_order
from trainer.strategies.pserver.worker.pull import WorkerPulls
from trainer.strategies.pserver.worker.push import PushEncoder
from trainer.strategies.pserver.worker.remote_model import DenseMap, RemoteTable
from trainer.strategies.seat import Seat
from trainer.weights.server_files import part_name

LEASE_LOOK_S = 0.02


class PserverWorker(Halting, ReadsStatistics, Strategy):
    """Base class of the workers of parameter servers, of which each mode overrides a part.

    Subclasses say when parameters are pulled and what is pushed.
    """

    Options = PserverStrategy
    options: PserverStrategy

    halts = True
    check_checkpoint: Callable[[bool], None] | None = None
    holds_rows = False
    """This worker keeps copies of rows and is told which of them others change."""

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        names = [seat.others.server_name(number) for number in range(seat.others.servers)]
        self.client = Client(
            seat.rank, self.connections(), self.options.timeout_s, names, seat.life.number, seat.life.returns
        )
        self.present = list(range(seat.size))
        self.work = HeldBlocks(self.client)
        self.gauge = Gauges(self.client)
        self.remote: list[RemoteTable] = []
        self.steps = 0
        self.steps_before = 0
        self.event_time = 0

    def connections(self) -> Connections:
        """Open the connections to all servers."""
        seat, options = self.seat, self.options
        shares = options.transport == "auto"
        return connect(seat, seat.others.servers, options.timeout_s, options.lost_after_s, self.io_threads, shares)

    # --- the start -------------------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.model = model
        self._divide(model, make_updater)
        self.make_updater(make_updater)
        if self.seat.rank == 0 and not self.seat.life.returns:
            send_start(self.client, self.dense, self.remote, self.dtype)
        self.take_all()
        if self.seat.life.returns:  # a checkpoint of the others will tell it the rest
            return model
        if self.options.load_from:
            self.take_schedule(f"goes on from {self.options.load_from}")
        self._agree_on([*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)])
        return model

    def _divide(self, model: nn.Module, make_updater: MakeUpdater) -> None:
        """Which parameter is at which server, and what moves them."""
        servers, rates, dense = self.seat.others.servers, make_updater.rates(model), dense_of(model)
        self.remote = [
            RemoteTable(number, name, module, servers, self.look_up, rates[f"{name}.weight"].lr)
            for number, (name, module) in enumerate(tables(model), 1)
        ]
        self.dense = DenseMap(dense, servers, self.options.split_method, self.options.slice_above, rates)  # type: ignore[arg-type]
        self.dtype = dense[0][1].dtype if dense else self.remote[0].dtype
        self.ahead = Ahead(self.remote)
        self.pulls = WorkerPulls(self.client, self.dense, self.remote, self.dtype, self.holds_rows)
        self.encoder = PushEncoder(self.remote, servers, self.wire)

    @property
    def io_threads(self) -> int:
        """The number of ZeroMQ threads in this worker."""
        return 1

    @property
    def wire(self) -> str:
        """How the values of a push are encoded."""
        return str(self.options.wire)

    def make_updater(self, make_updater: MakeUpdater) -> None:
        """Make an updater for the schedule alone: the servers own the optimizer."""
        self.updater = make_updater(nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=self.dtype))]))

    def take_schedule(self, what: str = "") -> None:
        """Set the schedule to the step that the servers have loaded; the first worker prints it after ``what``."""
        [answer] = self.client.wait([self.client.ask(0, Message(Verb.STATS))])
        statistics = answer.text()
        self.steps_before = self.updater.steps = int(statistics["step"])
        if self.updater.plateau is not None:
            self.updater.plateau.scale = float(statistics["scale"])
        if what and self.seat.rank == 0:
            print(
                f"{what} after step {self.steps_before} of the schedule, at a learning rate of {self.lr:g}", flush=True
            )

    def take_all(self) -> None:
        """Pull all dense parameters as they are now."""
        self.pulls.receive(self.pulls.fetch({}, dense=True, clock=0, flags=0))

    # --- a batch ---------------------------------------------------------------------------------------------------

    def expect(self, batch: Any) -> None:
        self.ahead.expect(batch.inputs, batch.on_host)

    def note(self, batch: Any) -> None:
        """Remember what is needed of the batch that is computed now: its inputs, time and leased block."""
        self.ahead.computing(batch.inputs, batch.on_host)
        readable = batch.inputs if batch.on_host is None else batch.on_host
        if isinstance(readable, dict) and "time" in readable:
            self.event_time = int(readable["time"].max())
        self.work.note(getattr(batch, "work", None))

    def take_fetched(self) -> bool:
        """Wait for the rows that were fetched ahead; returns whether there were any."""
        if self.ahead.fetched is None:
            return self.ahead.recall()
        (ids, fetched), self.ahead.fetched = self.ahead.fetched, None
        self.ahead.keep(ids, self.pulls.receive(fetched))
        return True

    def look_up(self, table: RemoteTable, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Return the rows of a table for a forward: fetched ahead if the batch was known, else pulled now."""
        training = torch.is_grad_enabled() and table.module.training
        if training and (ready := self.ahead.take(table, ids)) is not None:
            once, positions, rows = ready
            return once, positions, on_its_way(rows, ids.device)
        if training:
            self.ahead.learn_path(table, ids)
        once, positions = self.ahead.unique(table, ids)
        return once, positions, on_its_way(self.rows_now(table, once, training), ids.device)

    def rows_now(self, table: RemoteTable, ids: np.ndarray, training: bool) -> torch.Tensor:
        """Pull the rows of these ids and wait for them. In evaluation no new row is made."""
        wanted, flags = {table.number: ids}, CREATES if training else 0
        return self.pulls.receive(self.pulls.fetch(wanted, dense=False, clock=self.clock, flags=flags))[table.number]

    @property
    def clock(self) -> int:
        """The update that pulled parameters must contain at least."""
        return 0

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """For each server, its part (n,) of the dense gradient times a factor."""
        dense, room = self.dense, self.client.connections.room
        return [dense.gradients(s, factor, room(dense.size(s), dense.dtype)) for s in self.client.servers]

    def drop_gradients(self) -> None:
        """Drop the gradients of the dense parameters, like ``zero_grad``."""
        for parameter in self.dense.parameters.values():
            parameter.grad = None

    def age(self) -> int:
        """The age that this worker's rows are stamped with: its steps, or the data's own time."""
        return self.event_time if self.options.evict_by == "event_time" else self.steps + 1

    def push_pending(self) -> None:
        """Push all gradients or differences that are computed and not pushed yet."""
        self.finish_pushes()

    def finish_pushes(self) -> None:
        """Push all that is computed and not pushed yet, and wait until servers have acknowledged it."""

    @property
    def lr(self) -> float:
        self.updater.steps = self.steps_before + self.steps
        return self.updater.lr

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all servers the rate that validations give a plateau schedule, before this worker's next push."""
        self.updater.observe(step, metrics)
        if self.updater.plateau is not None:
            self._tell_all(Verb.RATE, {"scale": self.updater.plateau.scale})

    # --- leased work -----------------------------------------------------------------------------------------------

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        while True:
            answer = self.work.ask(epoch, blocks)
            if answer is None:
                yield None
                self.finish_pushes()
                self.rest()
                while (answer := self.work.ask(epoch, blocks)) is None:
                    self.client.connections.sleep(LEASE_LOOK_S)
                    if self.check_checkpoint is not None:
                        self.check_checkpoint(True)
                self.wake(anew=False)  # also when the epoch is over: the next one may follow without a meeting
            if answer.over:
                return
            if answer.fence:  # what is computed already must not travel with the block that is taken over
                yield None
                self.push_pending()
            lease = self.work.lease(epoch, answer)
            if self.work.torn:  # no push may combine what only some servers have with other batches
                yield None
                self.push_pending()
            yield lease

    def rest(self) -> None:
        """Take no more steps until :meth:`wake`; workers that wait for the slowest do not wait for this one."""

    def wake(self, anew: bool) -> None:
        """Take steps again; ``anew``: all workers begin together, after a collective call."""

    # --- meetings --------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        vector = values.detach().to("cpu", torch.float64).reshape(-1).numpy()
        sums = torch.from_numpy(self._sum(np.ascontiguousarray(vector)))
        return on_its_way(sums, values.device).view(values.shape)

    def _sum(self, values: np.ndarray, flags: int = 0) -> np.ndarray:
        self.client.meetings += 1
        check_checkpoint = None if self.check_checkpoint is None else partial(self.check_checkpoint, False)
        return self._met(Message(Verb.MEET, clock=self.client.meetings, flags=flags), values, check_checkpoint)

    def _met(
        self, message: Message, values: np.ndarray, check_checkpoint: Callable[[], None] | None = None
    ) -> np.ndarray:
        """(N,) the sum of what all present workers bring."""
        message.records = [Record(Kind.NUMBERS, values)]
        answer = self.client.meet(message, check_checkpoint)
        self.present = answer.need(Kind.IDS).tolist()
        return answer.need(Kind.NUMBERS).copy()

    @property
    def meetings(self) -> int:
        return self.client.meetings

    def meet(self) -> None:
        """Collective call: wait for all present workers."""
        self._sum(np.zeros(1))

    def meet_at_rest(self) -> None:
        """Collective call: all wait for each other, and none for another one's steps."""
        self.finish_pushes()
        self.rest()
        self._sum(np.zeros(1))
        self.wake(anew=True)

    def members(self) -> tuple[int, int]:
        return self.present.index(self.seat.rank), len(self.present)

    def agree(self, action: Callable[[int, int], Agreed], settle: Callable[[], None] = lambda: None) -> Agreed:
        while True:
            settle()  # who waits in it may stop with others, and knows other members then
            index, count = self.members()
            done = action(index, count)
            self._sum(np.zeros(1), SAVES)
            if len(self.present) == count:
                return done

    def synchronize(self) -> None:
        self.meet_at_rest()
        if (age := self.options.evict_after) is not None and self.members()[0] == 0:
            self._tell_all(Verb.SHRINK, {"age": age})
        self.take_all()
        self._agree_on(list(self.model.buffers()))

    def _agree_on(self, buffers: list[torch.Tensor]) -> None:
        if buffers:
            agree_on(buffers, self.all_reduce_sum, self.members()[0] == 0, self.options.buffers == "average")
        else:
            self._sum(np.zeros(1))

    def _tell_all(self, verb: Verb, body: Mapping[str, Any]) -> None:
        """Tell all servers, and wait until they have done it."""
        record = text(body)
        self.client.wait([self.client.ask(s, Message(verb, records=[record])) for s in self.client.servers])

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until everything that was sent has reached the servers."""
        self.finish_pushes()

    def stand(self) -> None:
        """Take no steps until ``set_out``; workers that wait for the slowest do not wait for this one."""

    def set_out(self) -> None:
        """Take steps again after ``stand``, together with all workers."""

    def take_in(self) -> None:
        """Receive what was fetched ahead."""
        if self.ahead.fetched is not None:
            self.pulls.receive(self.ahead.fetched[1])

    def save(self, folder: Path) -> Share:
        workers = self.save_servers(folder)
        self.set_out()
        files = [part_name(server) for server in self.client.servers]
        own = Own(
            self.seat.rank,
            self.seat.size,
            self.seat.others.servers,
            (self.steps, self.steps_before, self.event_time),
            self.work.state(),
            self.encoder.state(),
            self.ahead.state(),
            self.state(),
            self.dense.places,
        )
        return Share({"updater": self.updater.state()}, vars(own), files, workers)

    def load(self, folder: Path, share: Share) -> None:
        super().load(folder, share)
        own = Own(**share.own)
        self.steps, self.steps_before, self.event_time = own.steps or (self.updater.steps, 0, 0)
        if (own.rank, own.workers, own.servers) == (self.seat.rank, self.seat.size, self.seat.others.servers):
            self.work.load(**own.work)
            places = [] if own.places == self.dense.places else own.places
            self.encoder.load(feedback_in_order(self.dense, places, own.feedback))
            self.ahead.load(**own.ahead)
            self.go_on(**self.in_order(places, own.mode))
        else:
            self.begin_anew(own.workers)

    def in_order(self, places: Places, mode: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the mode has saved, in this run's order of the elements."""
        return mode

    def state(self) -> dict[str, Any]:
        """What a worker of this mode has of its own, for :meth:`go_on`."""
        return {}

    def go_on(self) -> None:
        """Restore what :meth:`state` returned."""

    def begin_anew(self, workers: int) -> None:
        """Begin from another worker's state, or that of other numbers of processes: only the place in the data
        counts."""

    # --- the log, and the end --------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Context manager: the model holds its tables' rows; larger tables than ``export_limit`` are left out, with a
        warning."""
        return merged_tables(self.remote, partial(self.rows_now, training=False), self.options.export_limit)

    def persist(self, folder: Path) -> None:
        """Have every server write its part of the persistables; the first worker completes them."""
        if not self.options.persistables:
            return

        def by_the_first(index: int, count: int) -> None:
            if index == 0:
                save_persistables(self.client, folder / "persistables")

        self._sum(np.zeros(1), SAVES)  # the first one has waited for the last checkpoint
        self.agree(by_the_first)

    def close(self) -> None:
        try:
            if not self.failed:
                self.client.bye()
        finally:
            self.client.close()
