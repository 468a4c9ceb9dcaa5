"""A server's own machine, as a process of the simulated world, and what is checked of it after every message."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.notes import Notes
from tests.simulation.boards import FarBoard, FarStore, Store
from tests.simulation.disks import Disks, SavedPart
from tests.simulation.nonsense import Nonsense
from tests.simulation.part_writer import Moment, SlowWriter
from tests.simulation.rows import Rows
from tests.simulation.scenario import Scenario
from tests.simulation.stage import STAGE
from tests.simulation.steps import Steps, pieces_of
from tests.simulation.world import Process, Violation, World
from trainer.config.run_config import RunConfig
from trainer.config.schema import CheckpointConfig, DataConfig, SchedulerConfig
from trainer.errors import RunFailed
from trainer.host.notes_board import NoNote
from trainer.strategies import builtin
from trainer.strategies.builtin import PserverDeclaration
from trainer.strategies.pserver.protocol.messages import (
    COMES,
    RESTS,
    RESUMES,
    WAKES,
    Kind,
    Message,
    Record,
    Verb,
    pack,
    unpack,
)
from trainer.strategies.pserver.server.machine import CHECK_S, Server

IDLE_S = 3.0
"""So often a server looks around while nothing comes. A real one does it more often, to the same effect."""
NONSENSE_AT_ONCE = 4
DECLARED: dict[str, type[PserverDeclaration]] = {
    "async": builtin.PserverAsyncDeclaration,
    "ssp": builtin.PserverSspDeclaration,
    "geo": builtin.PserverGeoDeclaration,
    "sync": builtin.PserverSyncDeclaration,
}


def copied(message: Message) -> Message:
    """What arrives of a message: its buffers as they are now."""
    if STAGE.codec:
        return unpack([bytearray(frame) for frame in pack(message)])
    m = message
    records = [Record(r.kind, r.array.copy(), r.table) if r.array.flags.writeable else r for r in m.records]
    return Message(m.verb, m.rank, m.incarnation, m.number, m.sequence, m.clock, m.flags, records)


RUN_DIR = "/nowhere"


def plan_of(workers: int, servers: int) -> Any:
    """What a server reads of the plan."""
    return SimpleNamespace(
        paths=SimpleNamespace(run_dir=RUN_DIR),
        model=SimpleNamespace(parameters=0),
        batches=SimpleNamespace(lr=1.0),
        length=SimpleNamespace(total_steps=1_000_000, steps_per_epoch=1000),
        topology=SimpleNamespace(workers=workers, roles={"worker": workers, "server": servers}),
    )


class Run:
    """What the launcher hands to a server."""

    def __init__(self, scenario: Scenario, resume: str) -> None:
        self.resume = resume
        self.config = _config(scenario.take_over, scenario.background)
        self.plan = plan_of(scenario.workers, scenario.servers)


@cache
def _config(take_over: bool, background: bool) -> RunConfig:
    data = DataConfig(on_lost_worker="take_over" if take_over else "drop")
    optimizer = {"_target_": "torch.optim.SGD", "lr": 1.0, "weight_decay": 0.0, "foreach": False, "sparse": "auto"}
    return RunConfig(
        optimizer=optimizer, data=data, scheduler=SchedulerConfig(), checkpoint=CheckpointConfig(background=background)
    )


def declared(scenario: Scenario) -> PserverDeclaration:
    """The run's strategy."""
    told = dict(scenario.options)
    count, probability = told.pop("count", 1), told.pop("probability", 1.0)
    entry = {"entry": {"count": count, "probability": probability}} if count > 1 or probability < 1 else {}
    return DECLARED[scenario.mode](**told, **entry)


class SimulatedServer(Process):
    """A server process.

    Args:
        strategy: the run's. resume: the checkpoint that it goes on from. unsure: pieces that may be applied twice.
        send: takes (server, an answer, which process gets it). heartbeats: ranks whose signs of life come now. life: of
        the process. place: the board's store, and its host; None: all are on one host. ended: told when the process
        has ended, and with which error.
    """

    def __init__(
        self,
        world: World,
        number: int,
        scenario: Scenario,
        strategy: PserverDeclaration,
        board: Notes | FarBoard,
        disks: Disks,
        begun: Mapping[str, tuple[np.ndarray, np.ndarray]],
        send: Callable[[int, Message, bytes], None],
        heartbeats: Callable[[int], list[int]],
        ended: Callable[[int, RunFailed | None], None],
        resume: str,
        unsure: list[int],
        life: int = 0,
        place: tuple[Store, int] | None = None,
    ) -> None:
        super().__init__(world, f"server {number}")
        self.life, self.resume = life, resume
        self.torn: set[int] = set()
        """Pieces that count as applied, and that this server's vectors lack."""
        self.number, self.scenario, self.send, self.heartbeats, self.tell_end = (
            number,
            scenario,
            send,
            heartbeats,
            ended,
        )
        self.share = scenario.workers if scenario.mode in ("geo", "sync") else 1
        """What one application of a piece is worth, as a part of 1."""
        self.busy = self.waited = 0.0
        """What the present turn has taken already: a disk's time, and that in which the board gave no answer; the
        latter alone."""
        self.inbox: list[tuple[bytes, Message]] = []
        self.missed_turns = False
        self.seen_version, self.unsure = 0, unsure
        self.dies_at: Verb | None = None
        self.die: Callable[[SimulatedServer], None] = lambda server: None
        """How it dies, soon after a message of that kind has come."""
        self.failed = False
        self.nonsense: Message | None = None
        self.answer_to_nonsense: Message | None = None
        self.begun = begun
        of_model = scenario.vectors or scenario.servers
        self.vectors = [f"vector{n}" for n in range(number, of_model, scenario.servers)]
        self.truth = Truth(self)
        self.steps = Steps(self) if scenario.mode == "sync" else None
        self.rows = Rows(self) if scenario.chooses_rows else None
        self.disks, self.host = disks, (scenario.hosts or [0] * scenario.servers)[number]
        self.writer = SlowWriter(self)
        self.board = board = (
            board if place is None else FarBoard(FarStore(place[0], place[1], self._real_time, self._waits))
        )
        run = Run(scenario, resume)
        self.machine = Server(number, run, strategy, self, board, self.clock, 1 << 26, None, life, self.writer)
        self.pulse = 0
        """Updates that the launcher knows of."""
        self.machine.report_done = partial(setattr, self, "pulse")
        self.save = self.machine.verbs[Verb.SAVE]
        self.machine.verbs[Verb.SAVE] = self._save
        self.news, self.check_workers = (-1, -1), self.machine.liveness.check_workers
        self.machine.liveness.check_workers = self._check_workers  # type: ignore[method-assign]
        world.after(IDLE_S * world.random.random(), self.idle)

    @cached_property
    def draw(self) -> random.Random:
        """Of its disk: other draws stay what they were."""
        return random.Random(f"{self.scenario.seed} {self.number} {self.life}")

    def clock(self) -> float:
        return self.world.now - self.lag + self.busy

    def _real_time(self) -> float:
        return self.world.now + self.busy

    def _waits(self, seconds: float) -> None:
        """For the board, in the middle of a turn."""
        self.busy += seconds
        self.waited += seconds

    def deliver(self, message: Message, address: bytes) -> None:
        """A message has arrived."""
        if self.dead or self.ended:
            return
        if message.verb == self.dies_at:
            self.dies_at = None
            self.world.after(0.5 * self.world.random.random() ** 2, self.die, self)
        self.inbox.append((address, message))
        if not self.stopped:
            self.turn()

    def idle(self) -> None:
        """Nothing has come for a while; signs of life have."""
        if self.dead or self.ended:
            return
        if not self.stopped:
            self.turn(beats=True)
        self.world.after(IDLE_S, self.idle)

    def goes_on(self) -> None:
        if not (self.dead or self.ended or self.stopped):
            self.turn(beats=True)

    def stop(self, seconds: float, suspended: bool = False) -> None:
        self._has_polled()
        self.missed_turns = True
        super().stop(seconds, suspended)

    def jump(self, seconds: float) -> None:
        self._has_polled()
        self.missed_turns = True
        super().jump(seconds)

    def _has_polled(self) -> None:
        """A real server has had turns without any message until now."""
        if not self.missed_turns and not self.stopped:
            self.machine.ended_turn = max(self.machine.ended_turn, self.clock() - CHECK_S)

    def turn(self, beats: bool = False) -> None:
        """One turn of the machine for each message, as its loop has them."""
        self._has_polled()
        self.missed_turns = False
        self.disks.here = self.host
        came = [[message] for message in self.inbox]
        if beats:  # they come over connections of their own, all at once
            came.append([(b"", _beat(rank)) for rank in self.heartbeats(self.number)])
        self.inbox = []
        try:
            for place, messages in enumerate(came):
                self.machine.turn(messages)
                self._look()
                if self.machine.over:
                    return self._end(None)
                if self.busy:
                    self.inbox = [message for later in came[place + 1 :] for message in later]
                    self._works()
                    return None
        except RunFailed as error:
            self._fails(error)
        except NoNote as error:  # as server.py
            self._fails(RunFailed(f"the other hosts cannot be reached: {error}"))
        return None

    def _fails(self, error: RunFailed) -> None:
        """It ends when its turn is over."""
        if self.waited:
            self.stopped_until = max(self.stopped_until, self.world.now + self.waited)
            self.world.at(self.stopped_until, self._end, error)
            self.waited = 0.0
        else:
            self._end(error)

    def _end(self, error: RunFailed | None) -> None:
        if self.dead or self.ended:
            return
        self.ended, self.failed = True, error is not None
        self.world.say(f"{self.name} ends: {error or 'all have left'}")
        self.tell_end(self.number, error)

    def _works(self) -> None:
        """A handler has taken so long; until then nothing else is done."""
        self.stopped_until = max(self.stopped_until, self.world.now + self.busy)
        self.machine.ended_turn = self.clock()
        self.busy = self.waited = 0.0
        self.world.at(self.stopped_until, self.goes_on)

    def _check_workers(self) -> None:
        """Who is missing: looked for only if there is a new note, a new life, a silence or its end, because nothing
        else tells it."""
        members = self.machine.members
        news = self.board.changes, sum([len(m.lives) for m in members.all])
        far = isinstance(self.board, FarBoard) and self.board.disturbed
        if news != self.news or members.silent() or self.machine.liveness.asked or far:
            self.news = news
            self.check_workers()

    def _save(self, message: Message) -> Message:
        folder = str(self.machine.saving.run_dir.resolve() / message.mapping()["folder"])
        began, self.world.moved = self.writer.count, self.world.now
        answer = self.save(message)
        self.disks.moments[folder, self.number] = Moment.of(self)
        if self.writer.count == began:  # a server that writes in its turn does nothing else
            self.world.injected["slow disk"] += self.scenario.disk_s > 0
            if self.scenario.disk_s:
                self.machine.saving._say("now")
                self.busy += self.scenario.disk_s
                self.world.after(self.busy, self._saved)
        return answer

    def _saved(self) -> None:
        if self.dead:
            return
        began = self.clock()
        self.machine.saving._say("")
        if self.busy:  # the board gives no answer: its turn is not over
            self.machine._spent(began)
            self._works()

    # --- the outlet ------------------------------------------------------------------------------------------------

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        """An answer goes its way, that to SAVE when all is written or before the disk is done; it is checked when it is
        given."""
        if request is self.nonsense:
            self.answer_to_nonsense = answer
            return
        self._look()
        if self.pulse < self.machine.parameters.version and answer.verb == Verb.DONE:
            raise Violation(
                f"{self.name} answers {request.verb.name} of worker {request.rank} when its launcher knows of "
                f"{self.pulse} of {self.machine.parameters.version} updates: a death now would lose the "
                f"others unsaid"
            )
        self.truth.answered(request, answer)
        if self.rows is not None and answer.verb == Verb.DONE:
            self.rows.answered(request, answer)
        copy = copied(answer)
        copy.rank, copy.number = request.rank, request.number
        if self.world.tracing:
            told = copy.mapping().get("why", "") if answer.verb == Verb.FAILED else ""
            self.world.say(
                f"{self.name} answers {request.verb.name} {request.number} of worker {request.rank}: "
                f"{answer.verb.name} {told}"
            )
        if later := self.busy if self.scenario.writes_first else self.waited:
            self.world.after(later, self._answer_late, copy, address)
        else:
            self.send(self.number, copy, address)

    def _answer_late(self, answer: Message, address: bytes) -> None:
        if not self.dead:
            self.send(self.number, answer, address)

    def refuse(self, why: BaseException) -> None:
        if self.nonsense is not None:
            return
        raise Violation(f"{self.name} refused a message of its own workers: {why!r}")

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def room_for_files(self) -> AbstractContextManager[None]:
        return nullcontext()

    def counts(self) -> dict[str, Any]:
        return {"bytes_in": 0, "bytes_out": 0}

    def gets_nonsense(self, rank: int) -> int:
        """Messages of a worker that no worker sends. They have to be refused, for the right reasons, and change
        nothing. Returns how many came: none before the start and after a worker's end, when everything is refused.

        Raises:
            Violation: one changes something.
        """
        parameters, member = self.machine.parameters, self.machine.members.all[rank]
        if self.stopped or parameters.shard is None or not parameters.ready or not member.present or not member.lives:
            return 0
        if any(
            w.request.verb == Verb.SAVE for w in self.machine.requests.waiting
        ):  # done with the next message, whichever it is
            return 0
        for _ in range(NONSENSE_AT_ONCE):
            saved = self.machine.saving.saver is not None
            comes = next((m.rank for m in self.machine.members.all if m.coming), 0)
            nonsense = Nonsense(
                parameters.shard, self.scenario.mode, member.watermark.greatest + 1, rank == 0, saved, comes
            )
            self._gets(*nonsense.drawn(self.world.random), rank)
        return NONSENSE_AT_ONCE

    def _gets(self, message: Message, why: str, rank: int) -> None:
        message.rank, message.incarnation, message.number = rank, self.machine.members.all[rank].incarnation, 1 << 40
        before = self._fingerprint(rank)
        self.nonsense, self.answer_to_nonsense = message, None
        self.machine.take(b"", message)
        self.nonsense, answer = None, self.answer_to_nonsense
        if self._fingerprint(rank) != before:
            raise Violation(f"{self.name} is changed by a message that makes no sense ({why})")
        told = answer.mapping().get("why", "") if answer is not None else "no answer"
        if why not in told:
            raise Violation(f"{self.name} says of a message that makes no sense ({why}): {told or 'done'}")

    def _fingerprint(self, rank: int) -> tuple[object, ...]:
        parameters, member = self.machine.parameters, self.machine.members.all[rank]
        shard = parameters.shard
        assert shard is not None
        rows = [len(t) for t in shard.tables.values()]
        mark = member.watermark
        members = [(m.life, m.coming, m.left, m.lost, len(m.fenced)) for m in self.machine.members.all]
        return (
            parameters.version,
            parameters.age,
            rows,
            mark.done,
            len(mark.above),
            shard.vector.numpy().tobytes(),
            members,
            self.board.changes,
        )

    # --- what is checked -------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Blocks that were dropped with lost workers."""
        return self.machine.leases.dropped

    def applied(self) -> np.ndarray:
        """How often each piece of work is applied here."""
        if self.steps is not None:
            return self.steps.counted
        shard = self.machine.parameters.shard
        if shard is None:
            return np.zeros(self.scenario.batches * self.scenario.epochs)
        if len(self.vectors) > 1 or self.begun:
            return self.by_vector().max(0)
        applied = shard.vector.numpy()
        return applied if self.share == 1 else applied * self.share

    def by_vector(self) -> np.ndarray:
        """How often each piece of work is applied to each vector of the model that is here."""
        shard, pieces = self.machine.parameters.shard, self.scenario.batches * self.scenario.epochs
        vectors = np.zeros((len(self.vectors), pieces)) if shard is None else shard.vector.numpy().reshape(-1, pieces)
        return np.stack([self._counted(name, vector) for name, vector in zip(self.vectors, vectors, strict=True)])

    def _counted(self, name: str, vector: np.ndarray) -> np.ndarray:
        values, applied = self.begun.get(name, (0.0, 0.0))
        return (vector - values) * self.share + applied

    def counts_of(self, part: SavedPart) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of a part that this server has written: by vector its values, and how often each piece is applied to it."""
        vectors = {name: part[f"dense|{name}|0"].numpy() for name in self.vectors}
        return {name: (vector, self._counted(name, vector)) for name, vector in vectors.items()}

    def _look(self) -> None:
        if self.rows is not None:
            self.rows.look()
        shard = self.machine.parameters.shard
        if shard is None or shard.version == self.seen_version:
            return
        self.seen_version = shard.version
        if self.steps is not None:
            self.steps.look(shard.vector.numpy(), shard.version)
            return
        applied = self.applied()
        if self.unsure:
            applied = np.delete(applied, self.unsure)
        if len(applied) and np.maximum.reduce(applied) > 1.000001:
            raise Violation(f"{self.name} has applied piece {int(applied.argmax())} {applied.max():g} times")


@cache
def _beat(rank: int) -> Message:
    return Message(Verb.BEAT, rank)


class Truth:
    """What a server's answers mean, counted a second time, by worker and life."""

    def __init__(self, server: SimulatedServer) -> None:
        self.server = server
        self.pushes: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.counted: dict[tuple[int, int], tuple[int, int | None]] = {}

    def answered(self, request: Message, answer: Message) -> None:
        """An answer leaves.

        Raises:
            Violation: it promises what is not so.
        """
        if answer.verb != Verb.DONE:
            return
        if request.verb == Verb.HELLO and request.flags & COMES:
            life = request.rank, request.sequence
            if life not in self.pushes:
                self.counted[life] = answer.sequence + 1, None
        if request.verb == Verb.PUSH:
            self._push(request, answer)
        elif request.verb == Verb.PULL and self.server.scenario.mode == "ssp":
            self._pull(request)

    def _push(self, request: Message, answer: Message) -> None:
        life = request.rank, self.server.machine.members.all[request.rank].life
        clock = answer.clock if request.flags & WAKES else request.clock
        self.pushes.setdefault(life, {}).setdefault(request.sequence, (request.flags, clock))
        server, work = self.server, request.first(Kind.WORK)
        if server.steps is not None:
            server.steps.answered(request)
            return
        pieces = pieces_of(request) if work is None else self._named(work)
        if not pieces:
            return
        applied = server.applied() if len(server.vectors) == 1 else server.by_vector().min(0)
        for piece in pieces:
            times = applied.item(piece)
            known = round(times) if piece not in server.unsure else min(1, round(times))
            if known != 1 and piece not in server.torn:
                raise Violation(
                    f"{server.name} has acknowledged piece {piece} of worker {request.rank} and applied it "
                    f"{times:g} times"
                )

    def _named(self, work: np.ndarray) -> list[int]:
        scenario, pieces = self.server.scenario, []
        for epoch, block, start, stop in work.tolist():
            first = epoch * scenario.batches + block * scenario.block
            pieces += range(first + start, first + stop)
        return pieces

    def _pull(self, request: Message) -> None:
        machine = self.server.machine
        bound = int(self.server.scenario.options["staleness"])
        for rank in machine.members.present():
            steps = self._steps(rank, machine.members.all[rank].life)
            if steps is not None and request.clock - steps > bound:
                raise Violation(
                    f"{self.server.name} gave worker {request.rank} parameters for a step after "
                    f"{request.clock}; worker {rank} has {steps}"
                )

    def _steps(self, rank: int, life: int) -> int | None:
        """Of a worker's pushes without a gap; None: it rests."""
        known = self.pushes.get((rank, life), {})
        sequence, steps = self.counted.get((rank, life), (1, 0))
        while sequence in known:
            flags, clock = known[sequence]
            if flags & RESTS:
                steps = None
            elif flags & (WAKES | RESUMES):
                steps = clock
            elif steps is None:
                raise Violation(f"worker {rank} takes a step that {self.server.name} does not count, because it rests")
            else:
                steps = max(steps, clock)
            sequence += 1
        self.counted[rank, life] = sequence, steps
        return steps
