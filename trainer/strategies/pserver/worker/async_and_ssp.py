"""The workers of strategy=pserver_async and pserver_ssp, which push gradients without a common step."""

# A gradient's way: computed -> merged -> pushed -> acknowledged. `step` merges it and pushes what is merged, unless too
# many pushes are unanswered and the merge may still grow. `send` waits for room; `finish_pushes` for all answers.
#
# States of a worker in ssp: stepping (`done` steps) -> resting -> stepping.
# It rests at meetings, while it waits for work, and while all stop; it wakes with the steps of the slowest other
# worker. Servers may answer WAKES with different numbers: then RESUMES tells all of them the greatest.
#
# What must always hold: every step of a worker that does not rest begins with a pull that the servers answer only when
# the slowest worker is near enough; a worker that rests takes no step.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.schema import PserverAsyncStrategy, StaleStrategy
from trainer.strategies.contract import MakeUpdater
from trainer.strategies.pserver.protocol.messages import RESTS, RESUMES, WAKES, Kind, Message, Record, Verb
from trainer.strategies.pserver.tables.row_arrays import summed
from trainer.strategies.pserver.worker.ahead import wanted
from trainer.strategies.pserver.worker.clipping import clip_factor, clip_values
from trainer.strategies.pserver.worker.common_start import CommonStart
from trainer.strategies.pserver.worker.push import Rows, WholePush
from trainer.strategies.pserver.worker.requests import Request


class Stale(CommonStart):
    """Base class of the pserver_async and pserver_ssp workers: pushes the gradient of its own batch and goes on.

    Gradients are merged (added up) while ``send_queue_size`` pushes are under way, up to ``most_merged``.
    """

    Options = StaleStrategy
    options: StaleStrategy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.merged = 0
        self.merged_dense: list[torch.Tensor] = []
        self.merged_rows: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {}
        self.merged_samples = 0.0
        self.pushes: list[Request] = []
        self.since_pull = 0

    def prepare(self, batch: Any) -> None:
        self.note(batch)
        self.begin()
        if not self.take_fetched() and self.due():
            self.pulls.receive(self.pulls.fetch({}, dense=True, clock=self.clock))
            self.since_pull = 0
        if self.early:
            self.fetch_ahead(batch.last)

    @property
    def early(self) -> bool:
        """Whether the next batch's parameters are requested before the current batch is computed."""
        return False

    @property
    def most_merged(self) -> int:
        """How many gradients one push may merge."""
        return 1

    @property
    def patience(self) -> int:
        """How many updates a merge waits for more gradients even if it could be pushed."""
        return 0

    @property
    def io_threads(self) -> int:
        return self.options.thread_pool_size

    def due(self, coming: int = 0) -> bool:
        """Whether dense parameters must be pulled after ``coming`` more updates."""
        return True

    def fetch_ahead(self, ends: bool = True) -> None:
        """Request the rows and parameters that the next batch needs, if that batch is known.

        Args:
            ends: the update ends before that batch; all batches of one see the same dense parameters.
        """
        coming = self.ahead.coming()
        if coming is None:
            return
        before = int(self.early)  # this batch's own update comes after the pull, and before its parameters are used
        dense = ends and self.due(before)
        if dense or coming:
            self.ahead.fetched = coming, self.pulls.fetch(wanted(coming), dense, self.clock)
        if dense:
            self.since_pull = -before

    def step(self, samples: int) -> None:
        rows: Rows = {t.number: t.gradient() for t in self.remote}
        parameters = self.dense.parameters.values()
        clip_values(parameters, rows, self.options.clip_value)
        factor = clip_factor(parameters, rows, self.options.clip_norm)
        if factor != 1.0:
            rows = {n: (ids, g * factor) for n, (ids, g) in rows.items()}
        self._merge(self.gradients(factor), rows, samples)
        self.drop_gradients()
        self.steps += 1
        self.since_pull += 1
        self.client.take()
        self.pushes = [p for p in self.pushes if p.answer is None]
        full = len(self.pushes) >= self.limit
        if self.work.must_push or self.merged >= self.most_merged or (not full and self.merged > self.patience):
            self.send()
        if not self.early:
            self.fetch_ahead()

    @property
    def limit(self) -> int:
        """How many pushes may be unanswered at a time."""
        return self.options.send_queue_size * self.seat.others.servers

    def _merge(self, dense: list[torch.Tensor], rows: Rows, samples: float) -> None:
        self.merged += 1
        self.merged_samples += samples
        for merged, new in zip(self.merged_dense, dense, strict=False):
            merged += new
        self.merged_dense = self.merged_dense or dense
        for number, part in rows.items():
            self.merged_rows.setdefault(number, []).append(part)

    def send(self) -> None:
        """Push the merged gradients; waits while too many pushes are unanswered."""
        if not self.merged:
            return

        def room() -> bool:
            self.pushes = [p for p in self.pushes if p.answer is None]
            return len(self.pushes) < self.limit

        self.client.until(room)
        rows = {n: parts[0] if len(parts) == 1 else summed(parts) for n, parts in self.merged_rows.items()}
        batches = self.work.take_computed()
        push = WholePush(
            self.merged_dense,
            rows,
            self.merged_samples,
            self.clock_after,
            self.age(),
            self.pulls.versions,
            batches.records,
            self.merged,
        )
        messages = self.encoder.messages(push)
        left = len(messages)

        def acknowledged(_: Message) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.work.acknowledged(batches)

        self.pushes += self.client.push(messages, acknowledged)
        self.merged, self.merged_dense, self.merged_rows, self.merged_samples = 0, [], {}, 0.0
        self.work.must_push = False

    @property
    def clock_after(self) -> int:
        """This worker's number of steps after its next push."""
        return self.steps

    def push_pending(self) -> None:
        self.send()

    def state(self) -> dict[str, Any]:
        return {"since_pull": self.since_pull, "versions": self.pulls.versions}

    def go_on(self, since_pull: int, versions: Sequence[int]) -> None:  # type: ignore[override]
        super().go_on()
        self.since_pull, self.pulls.versions = since_pull, list(versions)

    def begin_anew(self, workers: int) -> None:
        super().begin_anew(workers)
        if not self.seat.life.returns:  # who comes back takes them when it takes part
            self.take_all()  # what is loaded of the checkpoint's parameters is another worker's view of them
        if workers != self.seat.size:  # the servers count the steps of all
            self.steps = 0
            self.take_schedule()

    def finish_pushes(self) -> None:
        self.send()
        self.client.wait(self.pushes)
        self.pushes = []

    def take_all(self) -> None:
        super().take_all()
        self.since_pull = 0


class PserverAsync(Stale):
    """A worker of strategy=pserver_async: pushes its gradients and goes on, without waiting for other workers.

    With ``independent_recv_thread`` what the next batch needs is asked for before this one is computed: nothing is
    waited for, and the parameters lack this worker's last push. Without, it is asked for after the push, and contains
    it.
    """

    Options = PserverAsyncStrategy
    options: PserverAsyncStrategy

    @property
    def early(self) -> bool:
        wanted = self.options.independent_recv_thread
        return bool(self.remote) if wanted == "auto" else bool(wanted)

    @property
    def most_merged(self) -> int:
        return self.options.max_merge_var_num

    @property
    def patience(self) -> int:
        return self.options.send_wait_times

    def due(self, coming: int = 0) -> bool:
        return self.since_pull + coming >= self.options.min_send_grad_num_before_recv


class PserverSsp(Stale):
    """A worker of strategy=pserver_ssp: asynchronous, but at most ``staleness`` steps ahead of the slowest.

    Every step begins with a pull that the servers answer only when the slowest worker is near enough; ``done`` counts
    this worker's steps since the last meeting.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.done = 0
        self.rests = self.rested = False

    @property
    def clock(self) -> int:
        return self.done

    @property
    def clock_after(self) -> int:
        return self.done + 1

    def send(self) -> None:
        stepped = bool(self.merged)
        super().send()
        self.done += stepped

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.rests = self.seat.life.returns
        return super().setup(model, make_updater)

    def take_part(self) -> None:
        self.done = 1  # as the slowest of the others
        super().take_part()

    def stand(self) -> None:
        self.rested = self.rests
        if not self.rests:
            self.rest()

    def set_out(self) -> None:
        if self.rested:  # others begin at 0 again, and this worker as the slowest of them when it wakes
            self.done = 1
        else:
            self.wake(anew=True)

    def meet(self) -> None:
        self.meet_at_rest()

    def rest(self) -> None:
        self.rests = True
        self._say(RESTS, 0)

    def wake(self, anew: bool) -> None:
        """Take steps again, counting from those of the slowest other worker.
        Where servers disagree on who that is, the greatest number counts, so that nobody waits for steps this worker
        has left out."""
        self.rests = False
        clocks = {answer.clock for answer in self._say(WAKES, 0 if anew else self.done)}
        self.done = max(clocks)
        if len(clocks) > 1:
            self._say(RESUMES, self.done)

    def _say(self, flags: int, clock: int) -> list[Message]:
        numbers = Record(Kind.NUMBERS, np.zeros(3))
        messages = [Message(Verb.PUSH, clock=clock, flags=flags, records=[numbers]) for _ in self.client.servers]
        return self.client.wait(self.client.push(messages))
