"""SAVE and FETCH: a server's part of the persistables or of a checkpoint is written, and fetched by a worker on
another host."""

# States of a part: asked -> written by a copy, behind the answer -> sealed
#                         -> written before the answer -> sealed -> (on another host) fetched -> removed
#                         -> failed: a note beside the parts says why
# Who moves it: SAVE begins it, the copy or this process writes it, FETCH reads it, `has_written` sees the copy's end.
#
# What must always hold:
# - All workers stand still when SAVE of a checkpoint comes: the parts of all servers are of one moment.
# - One write at a time. A SAVE that comes meanwhile waits.
# - What was there under that name is removed before a part is written: a sealed part is of this SAVE.
# - Nothing is written outside of the run's folder.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer.checkpoint import durable_folder
from trainer.checkpoint.streamed import Streamed
from trainer.host.notes_board import Board, NoNote
from trainer.strategies.pserver.protocol import snapshot, snapshot_parts
from trainer.strategies.pserver.protocol.messages import APART, SAVING, Kind, Malformed, Message, Record, Verb, text
from trainer.strategies.pserver.protocol.snapshot_parts import DONE_WITH
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.increments import Full, Increments
from trainer.strategies.pserver.server.lease_requests import LeaseRequests
from trainer.strategies.pserver.server.ledger import Ledger
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import RULE, Parameters
from trainer.strategies.pserver.server.request_queue import Outlet
from trainer.strategies.pserver.server.saved_state_checks import kept_by
from trainer.strategies.pserver.server.shard import Shard
from trainer.weights.server_files import SINCE, full_name
from trainer.wording import sized

Tell = Callable[[str], bool]
"""Tells why a part is not written; returns whether that could be told."""


class PartWriter(Protocol):
    """Writes a server's part while the server goes on; one at a time."""

    def begin(self, write: Callable[[], None], failed: Tell) -> None:
        """Write what the server has at this moment.

        Args:
            failed: told why it could not be written, now or later.
        """

    def busy(self) -> bool:
        """Whether it still writes. Called now and then: a write that has failed is told of."""


class Saving:
    """The server's handlers of SAVE and FETCH.

    Args:
        outlet: makes room for files.
        ledger: what is applied, which a run that goes on cuts back.
        run_dir: the run's folder; nothing is written anywhere else.
        board: where workers that get no answer read why.
        life: of this server; it goes on from its own parts alone, or from what it began with.
        writer: of parts of checkpoints; None: they are written in turn, and all requests wait.
    """

    def __init__(
        self,
        parameters: Parameters,
        members: Members,
        work: LeaseRequests,
        outlet: Outlet,
        ledger: Ledger,
        run_dir: Path,
        board: Board,
        life: int,
        writer: PartWriter | None,
    ) -> None:
        self.parameters, self.members, self.work, self.outlet = parameters, members, work, outlet
        self.ledger = ledger
        self.run_dir, self.board, self.life = run_dir, board, life
        self.writer = writer if parameters.config.checkpoint.background else None
        self.writes = False
        self.unreported: tuple[Path, str] | None = None
        """The checkpoint whose part is not written, and why, until that can be told."""
        wanted = parameters.config.checkpoint.to is None  # a copy elsewhere has both files each time
        self.increments = Increments(parameters.server, life, wanted)
        self.apart: Path | None = None
        """Where the part is, if the worker that saves does not see it."""
        self.saver: tuple[int, int, int] | None = None
        """Whose SAVE came last: the worker, its life, the request's number."""

    def save(self, message: Message) -> Message:
        """SAVE: write this server's part of the persistables, or with ``checkpoint`` all that it takes to go on with
        the same workers. The answer tells whether the worker shares the folder; if so, the part of a checkpoint is
        written behind it.

        Raises:
            NotYet: the part before is still being written.
        """
        asked = message.mapping()
        run_dir = self.run_dir.resolve()
        folder, mark = run_dir / asked["folder"], asked.get("mark")
        if not folder.resolve().is_relative_to(run_dir):
            raise Malformed(f"SAVE to {folder}, which is not in the run's folder")
        if self.writer is not None and self.writer.busy():
            raise NotYet([], "the end of its write of the part before")
        self.unreported = None
        shard, rule = self.parameters.opened()
        apart = folder if mark is not None and not snapshot_parts.is_shared(folder, str(mark)) else None
        with self.outlet.room_for_files():  # the copy that writes has it, too
            snapshot_parts.begin_anew(folder, self.parameters.server)
            checkpoint = bool(asked.get("checkpoint"))
            full = self.increments.link(folder, shard) if checkpoint and apart is None else None
            tensors, numbers = shard.state(increment=full is not None)
            meta = {**numbers, **self._counts(), **self._kind(shard)}
            if checkpoint:
                tensors |= {f"{RULE}{name}": tensor for name, tensor in rule.state().items()}
                meta |= {"layout": shard.layout.plain(), "life": self.life}
            if full is not None:
                meta[SINCE] = full.version
            elif checkpoint and apart is None:
                self.increments.begin(folder, shard)
            write = partial(self._write, folder, tensors, meta, full)
            if asked.get("behind") and apart is None and self.writer is not None:
                self.writes = True
                self.writer.begin(write, partial(self._failed, folder))
            else:
                with self._said():
                    write()
        if self.apart not in (None, folder):  # who had it written fetches it no more
            snapshot_parts.forget(self.apart, self.parameters.server)
        self.saver = message.rank, message.incarnation, message.number
        self.apart = apart
        return Message(Verb.DONE, flags=self.flags)

    def _write(self, folder: Path, tensors: Mapping[str, Streamed], meta: Mapping[str, Any], full: Full | None) -> None:
        began = self.members.now()
        if full is not None:  # before the part: who completes the checkpoint waits for that alone
            durable_folder.adopt(folder, full_name(self.parameters.server), full.seal)
        snapshot.write_part(folder, self.parameters.server, tensors, meta)
        size = sum(t.nbytes for t in tensors.values())
        what = "" if full is None else " of changed rows"
        print(f"saved {sized(size)}{what} in {self.members.now() - began:.2f} s", flush=True)

    def has_written(self) -> bool:
        """Whether a background write has ended since the last call."""
        self._report_failure()
        wrote, self.writes = self.writes, self.writer is not None and self.writer.busy()
        return wrote and not self.writes

    def _failed(self, folder: Path, why: str) -> bool:
        """Report why this server's part is not written to the worker that completes the checkpoint. Returns False if
        the report has to be tried again, as on a disk that is read-only for a while."""
        self.unreported = folder, why
        reported = self._report_failure()
        with suppress(OSError):  # the log may be on that disk, too
            print(snapshot_parts.failure(self.parameters.server, why), flush=True)
        return reported

    def _report_failure(self) -> bool:
        if self.unreported is not None and snapshot_parts.leave_failure(
            self.unreported[0], self.parameters.server, self.unreported[1]
        ):
            self.unreported = None
        return self.unreported is None

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Context manager: workers that get no answer can read why."""
        self._say("now")
        try:
            yield
        finally:
            self._say("")

    def _say(self, what: str) -> None:
        try:
            self.board.set(SAVING.format(self.parameters.server), what)
        except NoNote as error:  # workers ask again, and no part is lost for it
            print(f"no note tells that this server saves: {error}", flush=True)

    @property
    def flags(self) -> int:
        """The flags of the answer to SAVE: whether the part is apart from where the worker completes the snapshot."""
        return 0 if self.apart is None else APART

    def fetch(self, message: Message) -> Message:
        """FETCH: bytes of a part that the worker does not see; :data:`DONE_WITH`: the server removes it."""
        first, server = message.clock, self.parameters.server
        if first < DONE_WITH:
            raise Malformed(f"FETCH from {first}")
        if first == DONE_WITH:
            if self.apart is not None and self._is_of_this_save(message):
                snapshot_parts.forget(self.apart, server)
                self.apart = None
            return Message(Verb.DONE)
        if self.saver is None:
            raise Malformed("FETCH of what was not saved")
        if self.apart is None:  # a late copy: its worker has the answer
            return Message(Verb.DONE)
        with self.outlet.room_for_files():
            seal, some = snapshot_parts.piece(self.apart, server, first)
        return Message(Verb.DONE, records=[text(seal), Record(Kind.DENSE, some)])

    def _is_of_this_save(self, message: Message) -> bool:
        """Whether the request is for the present part: a late copy about the part before must not remove this one."""
        rank, life, number = self.saver or (-1, 0, 0)
        return (message.rank, message.incarnation) == (rank, life) and message.number > number

    def _counts(self) -> dict[str, Any]:
        """The progress of the run: pushes by worker, batches by block, ages."""
        marks = {str(m.rank): [m.watermark.done, sorted(m.watermark.above)] for m in self.members.all}
        return {
            "watermarks": marks,
            "progress": self.work.progress.state(),
            "leases": self.work.leases.state(),
            **self.ledger.place,
            "age": self.parameters.age,
            "age_before": self.parameters.age_before,
            "evict_by": self.parameters.strategy.evict_by,
        }

    def _kind(self, shard: Shard) -> Mapping[str, Any]:
        """What a run must have in common with this one to go on from the part."""
        layout = shard.layout
        return {
            "mode": self.parameters.mode,
            "optimizer": kept_by(self.parameters.config.optimizer),
            "dtype": layout.dtype,
            "step": shard.step,
            "tables": {
                t.name: {
                    "dim": t.dim,
                    "dtype": layout.dtype,
                    "kernel": t.kernel.name,
                    "num_rows": t.num_rows,
                    "rows": len(t),
                    "init": t.init.kind,
                    "scale": t.init.scale,
                    "seed": shard.config.seed,
                }
                for t in shard.tables.values()
            },
            "dense": [{"name": n, "start": a, "stop": b} for n, a, b in layout.pieces],
        }
