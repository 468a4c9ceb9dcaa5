"""What all parameter-server modes do in a worker: place the model, look rows up, meet, settle, save, leave."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.errors import RunFailed
from trainer.models.rows import dense_of, tables
from trainer.strategies.contract import Lease, MakeUpdater, Seat, Strategy
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.codec import Feedback, decode, encode
from trainer.strategies.pserver.protocol.messages import CREATES, WANTS_DENSE, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.client import Client, Request
from trainer.strategies.pserver.worker.remote_model import DenseMap, RemoteTable, layouts, unique
from trainer.wording import counted

ROWS_AT_ONCE = 1 << 16
LEASE_LOOK_S = 0.02
GAUGES_EVERY_S = 2.0


Ahead = dict[int, tuple[torch.Tensor, np.ndarray, torch.Tensor]]
"""Of a batch that comes: by table, its ids, once each, and their positions."""


class Fetched:
    """A pull of parameters under way: requests to all servers, and for each table the unique ids asked for."""

    def __init__(self, requests: list[Request], asked: dict[int, tuple[np.ndarray, list[np.ndarray]]], dense: bool) -> None:  # fmt: skip
        self.requests, self.asked, self.dense = requests, asked, dense


class PserverWorker(Strategy):
    """A worker of a parameter server.

    Subclasses say when parameters are pulled and what is pushed.
    """

    looks_ahead = True
    hold_flag = 0

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.client = Client(
            seat, seat.servers, config["timeout_s"], config["lost_after_s"], config.get("thread_pool_size", 1)
        )
        self.present = list(range(seat.size))
        self.remote: list[RemoteTable] = []
        self.paths: dict[int, str | None] = {}
        self.inputs: Any = None
        self.coming: Ahead | None = None
        self.fetched: tuple[Ahead, Fetched] | None = None
        self.ready_rows: dict[tuple[int, int], tuple[torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor]] = {}
        self.steps = 0
        self.bases = [0] * seat.servers
        self.steps_before = 0
        self.work: list[list[int]] = []
        self.open_blocks: dict[int, bool] = {}
        self.done_blocks: list[int] = []
        self.cuts: dict[tuple[int, int], tuple[int, ...]] = {}
        self.must_push = False
        self.event_time = 0
        self._asked_gauges: tuple[float, list[Request]] = (0.0, [])
        self._before: dict[int, dict[str, float]] = {}

    # --- the start -------------------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.model = model
        servers = self.seat.servers
        found = list(tables(model))
        dense, rates = dense_of(model), make_updater.rates(model)
        lrs = {name: rates[f"{name}.weight"].lr for name, _ in found}
        self.remote = [
            RemoteTable(n + 1, name, m, servers, self.look_up, lrs[name]) for n, (name, m) in enumerate(found)
        ]
        self.dense = DenseMap(dense, servers, self.config["split_method"], self.config["slice_above"], rates)
        self.dtype = dense[0][1].dtype if dense else self.remote[0].dtype
        self.feedback = [Feedback(self.config["wire"]) for _ in self.client.servers]
        self.make_updater(make_updater)
        if self.seat.rank == 0:
            self._send_start()
        self.take_all()
        if self.config["load_from"]:
            self._go_on()
        self._agree_on([*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)])
        return model

    def make_updater(self, make_updater: MakeUpdater) -> None:
        """A worker that owns no optimizer needs it for the schedule alone."""
        self.updater = make_updater(nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=self.dtype))]))

    def _go_on(self) -> None:
        """What the servers have loaded says how far the schedule is."""
        [answer] = self.client.wait([self.client.ask(0, Message(Verb.STATS))])
        told = answer.text()
        self.steps_before = self.updater.steps = int(told["step"])
        if self.updater.plateau is not None:
            self.updater.plateau.scale = float(told["scale"])
        if self.seat.rank == 0:
            told = f"after step {self.steps_before} of the schedule, at a learning rate of {self.lr:g}"
            print(f"goes on from {self.config['load_from']} {told}", flush=True)

    def _send_start(self) -> None:
        told = layouts(self.dense, self.remote, self.dtype, self.seat.servers)
        bulky = [t for t in self.remote if t.start is not None]
        requests = []
        for server in self.client.servers:
            layout = told[server]
            plain = {
                "dtype": layout.dtype, "pieces": layout.pieces, "groups": layout.groups,
                "tables": [vars(t) for t in layout.tables],
            }  # fmt: skip
            values = encode(self.dense.values(server), Kind.DENSE, 0)
            requests.append(
                self.client.ask(server, Message(Verb.START, records=[text({**plain, "last": not bulky}), *values]))
            )
        self.client.wait(requests)
        for table in bulky:
            assert table.start is not None
            for first in range(0, len(table.start), ROWS_AT_ONCE):
                ids = np.arange(first, min(first + ROWS_AT_ONCE, len(table.start)))
                last = table is bulky[-1] and first + len(ids) == len(table.start)
                requests = []
                for server, places in enumerate(table.split(ids)):
                    own = np.ascontiguousarray(ids[places])
                    rows = encode(table.start[torch.from_numpy(own)].contiguous(), Kind.ROWS, table.number)
                    records = [text({"last": last}), Record(Kind.IDS, own, table.number), *rows]
                    requests.append(self.client.ask(server, Message(Verb.START, records=records)))
                self.client.wait(requests)
        for table in bulky:
            table.start = None

    def take_all(self) -> None:
        """Pull the dense parameters as they are."""
        self.receive(self.fetch({}, dense=True, clock=0, flags=0))

    # --- pulling ---------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Mapping[int, np.ndarray], dense: bool, clock: int, flags: int = CREATES) -> Fetched:
        """Ask for rows by table number, and for the dense parameters."""
        asked = {n: (ids, self.remote[n - 1].split(ids)) for n, ids in wanted.items()}
        requests = []
        for server in self.client.servers:
            records = [
                Record(Kind.IDS, ids if self.seat.servers == 1 else np.ascontiguousarray(ids[places[server]]), n)
                for n, (ids, places) in asked.items()
            ]
            if not dense and not any(len(r.array) for r in records):
                continue
            flag = flags | self.hold_flag * bool(flags & CREATES) | (WANTS_DENSE if dense else 0)
            requests.append(self.client.ask(server, Message(Verb.PULL, clock=clock, flags=flag, records=records)))
        return Fetched(requests, asked, dense)

    def receive(self, fetched: Fetched) -> dict[int, torch.Tensor]:
        """Wait for a pull: writes the dense parameters into the model, returns rows (U, D) by table."""
        self.client.wait(fetched.requests)
        rows: dict[int, torch.Tensor] = {}
        for request in fetched.requests:
            answer = request.answer
            assert answer is not None
            if fetched.dense:
                self.bases[request.server] = answer.clock
                array = answer.first(Kind.DENSE)
                if array is not None:
                    self.dense.write(request.server, decode(array, None, self.dtype))
            for number, (ids, places) in fetched.asked.items():
                array = answer.first(Kind.ROWS, number)
                if array is None:
                    continue
                values = decode(array, None, self.dtype)
                if self.seat.servers == 1:
                    rows[number] = values
                    continue
                if number not in rows:
                    rows[number] = torch.empty((len(ids), values.shape[1]), dtype=self.dtype)
                rows[number][torch.from_numpy(places[request.server])] = values
        for number, (ids, _) in fetched.asked.items():
            rows.setdefault(number, torch.empty((len(ids), self.remote[number - 1].dim), dtype=self.dtype))
        return rows

    def look_up(self, table: RemoteTable, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """A forward's rows: fetched ahead where the batch was known, else now."""
        training = torch.is_grad_enabled() and table.module.training
        ready = self.ready_rows.pop((table.number, id(ids)), None) if training else None
        if ready is not None and ready[0] is ids:
            return ready[1], ready[2], ready[3].to(ids.device)
        if training and table.number not in self.paths:
            self._learn_path(table, ids)
        once, positions = unique(ids)
        rows = self.rows_now(table, once, training)
        return once, positions, rows.to(ids.device)

    def rows_now(self, table: RemoteTable, ids: np.ndarray, training: bool) -> torch.Tensor:
        """Rows of these ids, waited for. In evaluation none is made."""
        fetched = self.fetch({table.number: ids}, dense=False, clock=self.clock, flags=CREATES if training else 0)
        return self.receive(fetched)[table.number]

    @property
    def clock(self) -> int:
        """The update that pulled parameters must contain."""
        return 0

    def _learn_path(self, table: RemoteTable, ids: torch.Tensor) -> None:
        """Which part of a batch holds a table's ids, so that the next batch's can be fetched ahead."""
        named = self.inputs.items() if isinstance(self.inputs, dict) else [("", self.inputs)]
        self.paths[table.number] = next((name for name, value in named if value is ids), None)
        if self.paths[table.number] is None:
            print(f"table {table.name}: its ids are computed inside the model, so its rows cannot be fetched ahead", flush=True)  # fmt: skip

    def expect(self, batch: Any) -> None:
        self.coming = self.ids_ahead(batch.inputs)

    def ids_ahead(self, inputs: Any) -> Ahead:
        """Of a batch that comes: by table, its ids, once each, and their positions; where they can be known."""
        found = {}
        for table in self.remote:
            path = self.paths.get(table.number)
            if path is not None:
                ids = inputs[path] if path else inputs
                found[table.number] = (ids, *unique(ids))
        return found

    def take_fetched(self) -> bool:
        """Wait for what was fetched ahead, if anything was; returns whether."""
        if self.fetched is None:
            return False
        (ahead, fetched), self.fetched = self.fetched, None
        self.keep_rows(ahead, self.receive(fetched))
        return True

    def keep_rows(self, ahead: Ahead, rows: Mapping[int, torch.Tensor]) -> None:
        """Rows that were fetched ahead, for the forward that comes."""
        self.ready_rows = {(n, id(ids)): (ids, once, places, rows[n]) for n, (ids, once, places) in ahead.items()}

    # --- work ------------------------------------------------------------------------------------------------------

    def note(self, batch: Any) -> None:
        """Remember what is needed of a batch that is computed now."""
        self.inputs = batch.inputs
        if isinstance(batch.inputs, dict) and "time" in batch.inputs:
            self.event_time = int(batch.inputs["time"].max())
        work = getattr(batch, "work", None)
        if work is not None:
            epoch, block, index, last = work
            if self.work and self.work[-1][:2] == [epoch, block] and self.work[-1][3] == index:
                self.work[-1][3] = index + 1
            else:
                self.work.append([epoch, block, index, index + 1])
            if last:
                self.open_blocks[block] = True
            self.must_push = index + 1 in self.cuts.get((epoch, block), ())

    def work_record(self) -> tuple[list[Record], list[int]]:
        """The work that a push covers, and the blocks that it finishes."""
        if not self.work:
            return [], []
        array = np.array(self.work, dtype=np.int64)
        finished = [block for block in self.open_blocks if block in {w[1] for w in self.work}]
        for block in finished:
            del self.open_blocks[block]
        self.work = []
        return [Record(Kind.WORK, array)], finished

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        while True:
            answer = self._ask_lease(epoch, blocks)
            if answer is None:
                yield None
                self.finish_pushes()
                self.rest()
                while (answer := self._ask_lease(epoch, blocks)) is None:
                    time.sleep(LEASE_LOOK_S)
                if not answer["over"]:
                    self.wake(anew=False)
            if answer["over"]:
                return
            yield self._lease(epoch, answer)

    def _ask_lease(self, epoch: int, blocks: int) -> dict[str, Any] | None:
        self.client.take()
        done, self.done_blocks = self.done_blocks, []
        request = {"epoch": epoch, "blocks": blocks, "done": done}
        [answer] = self.client.wait([self.client.ask(0, Message(Verb.LEASE, records=[text(request)]))])
        told: dict[str, Any] = answer.text()
        return None if told["block"] < 0 and not told["over"] else told

    def _lease(self, epoch: int, told: Mapping[str, Any]) -> Lease:
        block = int(told["block"])

        def empty() -> None:
            self.done_blocks.append(block)

        if not told["fence"]:
            return Lease(block, 0, empty)
        rank, incarnation = told["fence"]
        body = {"rank": rank, "incarnation": incarnation, "epoch": epoch, "block": block}
        asks = [self.client.ask(s, Message(Verb.FENCE, records=[text(body)])) for s in self.client.servers]
        done = sorted({int(a.need(Kind.NUMBERS)[0]) for a in self.client.wait(asks)})
        print(f"takes over block {block} of worker {rank} from its batch {done[0]} on", flush=True)
        self.cuts[epoch, block] = tuple(done[1:])
        return Lease(block, done[0], empty)

    def rest(self) -> None:
        """No steps are taken until ``wake``; who waits for the slowest does not wait for this worker."""

    def wake(self, anew: bool) -> None:
        """Steps are taken again; ``anew``: after a meeting, all begin together."""

    # --- updates ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_values(self, rows: Mapping[int, tuple[np.ndarray, torch.Tensor]], limit: float | None) -> None:
        """Bring each element of this worker's own gradient into [-limit, limit]."""
        if limit is not None:
            grads = [p.grad for p in self.dense.parameters.values() if p.grad is not None]
            for values in (*grads, *(g for _, g in rows.values())):
                values.clamp_(-limit, limit)

    def clip(self, rows: Mapping[int, tuple[np.ndarray, torch.Tensor]], norm: float | None) -> float:
        """The factor that brings this worker's own gradient to at most that norm."""
        if norm is None:
            return 1.0
        grads = [p.grad for p in self.dense.parameters.values() if p.grad is not None]
        square = sum(float(g.double().square().sum()) for g in [*grads, *(g for _, g in rows.values())])
        return float(min(1.0, norm / (square**0.5 + 1e-6)))

    def drop_gradients(self) -> None:
        """As ``zero_grad``."""
        for parameter in self.dense.parameters.values():
            parameter.grad = None

    def age(self) -> int:
        """What rows are stamped with: steps, or the data's own time."""
        return self.event_time if self.config["evict_by"] == "event_time" else self.steps + 1

    def push_messages(
        self, dense: list[torch.Tensor] | None, rows: Mapping[int, tuple[np.ndarray, torch.Tensor]],
        samples: float, clock: int, work: list[Record], form: str | None = None, bases: list[int] | None = None,
        merged: int = 1,
    ) -> list[Message]:  # fmt: skip
        """A push's message for each server.

        Args:
            merged: gradients that are added up in it.
            bases: per server, the version that the worker has; None: that of the parameters that it computed with.
        """
        bases = self.bases if bases is None else bases
        form = self.config["wire"] if form is None else form
        places = {n: self.remote[n - 1].split(ids) for n, (ids, _) in rows.items()}
        messages = []
        for server in self.client.servers:
            records = [
                Record(Kind.NUMBERS, np.array([bases[server], samples, self.age(), merged], dtype=np.float64)),
                *work,
            ]
            if dense is not None and len(dense[server]):
                feedback = self.feedback[server]
                records += feedback.encode(dense[server], Kind.DENSE, 0) if form == "int8" else encode(dense[server], Kind.DENSE, 0, form)  # fmt: skip
            for n, (ids, values) in rows.items():
                if self.seat.servers > 1:
                    own = places[n][server]
                    ids, values = np.ascontiguousarray(ids[own]), values[torch.from_numpy(own)]
                if len(ids):
                    row_form = "bf16" if form == "int8" else form
                    records += [Record(Kind.IDS, ids, n), *encode(values.contiguous(), Kind.ROWS, n, row_form)]
            messages.append(Message(Verb.PUSH, clock=clock, records=records))
        return messages

    def finish_pushes(self) -> None:
        """Everything that was computed is pushed and acknowledged."""

    @property
    def lr(self) -> float:
        self.updater.steps = self.steps_before + self.steps
        return self.updater.lr

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every worker tells all servers what validations have brought a plateau schedule to, before its next push."""
        self.updater.observe(step, metrics)
        if self.updater.plateau is not None:
            told = text({"scale": self.updater.plateau.scale})
            self.client.wait([self.client.ask(s, Message(Verb.RATE, records=[told])) for s in self.client.servers])

    # --- meetings --------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.client.meetings += 1
        mine = values.detach().to("cpu", torch.float64).reshape(-1).numpy()
        request = self.client.ask(
            0,
            Message(Verb.MEET, clock=self.client.meetings, records=[Record(Kind.NUMBERS, np.ascontiguousarray(mine))]),
        )
        [answer] = self.client.wait([request])
        self.present = answer.need(Kind.IDS).tolist()
        return torch.from_numpy(answer.need(Kind.NUMBERS).copy()).to(values.device).view(values.shape)

    def meet(self) -> None:
        """Wait for all present workers."""
        self.all_reduce_sum(torch.zeros(1, dtype=torch.float64))

    def members(self) -> tuple[int, int]:
        return self.present.index(self.seat.rank), len(self.present)

    def synchronize(self) -> None:
        self.finish_pushes()
        self.rest()
        self.meet()
        self.wake(anew=True)
        if (age := self.config["evict_after"]) is not None and self.members()[0] == 0:
            self.client.wait([self.client.ask(s, Message(Verb.SHRINK, records=[text({"age": age})])) for s in self.client.servers])  # fmt: skip
        self.take_all()
        self._agree_on_buffers()

    def _agree_on_buffers(self) -> None:
        self._agree_on(list(self.model.buffers()))

    @torch.no_grad()
    def _agree_on(self, buffers: list[torch.Tensor]) -> None:
        """The first worker's buffers, or their average; a meeting in any case, so that all begin together."""
        average = self.config["buffers"] == "average"
        first = self.present[0] == self.seat.rank
        parts = [
            b.detach().to("cpu", torch.float64).reshape(-1) if first or (average and b.is_floating_point())
            else torch.zeros(b.numel(), dtype=torch.float64)
            for b in buffers
        ]  # fmt: skip
        sums = self.all_reduce_sum(torch.cat([torch.ones(1, dtype=torch.float64), *parts]))
        offset = 1
        for buffer in buffers:
            part = sums[offset : offset + buffer.numel()].view(buffer.shape)
            offset += buffer.numel()
            if average and buffer.is_floating_point():
                part = part / sums[0]
            buffer.copy_(part.to(buffer.dtype))

    # --- saving ----------------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Tables of at most ``export_limit`` values are merged into the model; larger ones are left out, loudly."""
        filled = []
        for table in self.remote:
            if table.rows is None or table.rows * table.dim > self.config["export_limit"]:
                size = "any number of" if table.rows is None else f"{table.rows:,}"
                print(f"table {table.name} ({size} rows of {table.dim}) is left out of model.safetensors (strategy.export_limit); the persistables hold its rows", flush=True)  # fmt: skip
                continue
            weight = torch.empty((table.rows, table.dim), dtype=self.dtype)
            for first in range(0, table.rows, ROWS_AT_ONCE):
                ids = np.arange(first, min(first + ROWS_AT_ONCE, table.rows))
                weight[first : first + len(ids)] = self.rows_now(table, ids, training=False)
            table.module.weight = nn.Parameter(weight)
            filled.append(table)
        try:
            yield
        finally:
            for table in filled:
                table.detach()

    def save(self, folder: Path) -> None:
        """Persistables: every server writes its part, the first worker completes them."""
        if not self.config["persistables"]:
            return
        self.meet()
        while True:  # again when somebody was lost meanwhile, who may have been the first
            taking_part = len(self.present)
            if self.members()[0] == 0:
                self._save(folder / "persistables")
            self.meet()
            if len(self.present) == taking_part:
                return

    def _save(self, folder: Path) -> None:
        target = snapshot.begin(folder)
        body = text({"folder": str(target)})
        self.client.wait([self.client.ask(s, Message(Verb.SAVE, records=[body])) for s in self.client.servers], patience_s=3600)  # fmt: skip
        snapshot.complete(target, self.seat.servers)
        print(f"persistables of {counted(self.seat.servers, 'server')}: {folder}", flush=True)

    # --- the log, and the end --------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Per server: pushes and pulls per second, megabytes per second, requests that wait there, rows, median staleness;
        and this worker's queue: its pushes that are not answered yet. Of what was told before nothing is told again."""
        self.client.take()
        asked_at, requests = self._asked_gauges
        found: dict[str, float] = {}
        if requests and all(r.answer is not None for r in requests):
            found = self._told(requests)
            self._asked_gauges = asked_at, []
        if not self._asked_gauges[1] and time.monotonic() - asked_at > GAUGES_EVERY_S:
            asks = [self.client.ask(s, Message(Verb.STATS)) for s in self.client.servers]
            self._asked_gauges = time.monotonic(), asks
        queued = [r.server for r in self.client.under_way.values() if r.message.verb == Verb.PUSH]
        return found | {f"server{s}/queue": float(queued.count(s)) for s in self.client.servers}

    def last_gauges(self) -> dict[str, float]:
        self.client.wait(self._asked_gauges[1])
        asks = [self.client.ask(s, Message(Verb.STATS)) for s in self.client.servers]
        self.client.wait(asks)
        return self._told([*self._asked_gauges[1], *asks])

    def _told(self, requests: list[Request]) -> dict[str, float]:
        """What servers have answered, the last answer of each."""
        found: dict[str, float] = {}
        for request in requests:
            assert request.answer is not None
            found |= self._rates(request.server, request.answer.text())
        return found

    def _rates(self, server: int, now: dict[str, Any]) -> dict[str, float]:
        """What a server tells, its rates since it told before: since its start they would be those of waiting for workers."""
        before = self._before.get(server)
        self._before[server] = {k: float(now[k]) for k in ("seconds", "pushes", "pulls", "bytes_in", "bytes_out")}
        found = {"waiting": float(now["waiting"]), "rows": float(now["rows"])}
        if before is not None and (seconds := now["seconds"] - before["seconds"]) > 0:
            rate = {k: (now[k] - before[k]) / seconds for k in ("pushes", "pulls", "bytes_in", "bytes_out")}
            found |= {"pushes_per_s": rate["pushes"], "pulls_per_s": rate["pulls"]}
            found["mb_per_s"] = (rate["bytes_in"] + rate["bytes_out"]) / 1e6
        if now["staleness"]:
            found["staleness"] = _median({int(k): v for k, v in now["staleness"].items()})
        return {f"server{server}/{name}": value for name, value in found.items()}

    def close(self) -> None:
        try:
            self.client.bye()
        finally:
            self.client.close()


def _median(counts: Mapping[int, int]) -> float:
    half, seen = sum(counts.values()) / 2, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= half:
            return float(value)
    raise RunFailed("a histogram without counts")
