"""Captures a whole update as a CUDA graph, and replays it: ``execution.cuda_graph=true``.

    warm-up    the first 11 updates run as they are, on a stream of their own: torch asks for 11 under DDP, which makes
               its buckets, and for the streams of NCCL (CUDA semantics, "whole-network capture", torch 2.15)
    capture    the next update is recorded: forward, backward with the exchange of gradients, optimizer. Nothing is
               computed
    replay     this update and all later ones: the batch is copied into the graph's memory, and the graph is started

What changes between updates lies in tensors of the graph: inputs, labels, learning rates, and which samples count.
A batch that is not full is padded with its first sample, which does not count: its loss is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch

from trainer.data.feed import Batch
from trainer.errors import RunFailed, first_line
from trainer.metrics.contract import Loss
from trainer.metrics.criterion import Criterion
from trainer.optim.updater import Updater
from trainer.worker.loop import forward
from trainer.worker.training import Training

WARM_UP = 11


class Graph(Protocol):
    """Records kernels, and starts them again."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Context manager: an update that is computed at once, before the capture."""

    def capture(self, work: Callable[[], None]) -> None:
        """Record what ``work`` asks of the GPU, without computing it."""

    def replay(self) -> None:
        """Compute what was recorded."""


class CudaGraph:
    """torch's graph of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.graph = torch.cuda.CUDAGraph()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        others = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(others)
        with torch.cuda.stream(self.stream):
            yield
        others.wait_stream(self.stream)

    def capture(self, work: Callable[[], None]) -> None:
        # other threads of this process (NCCL's watchdog, the monitor) may go on asking CUDA meanwhile
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        self.graph.replay()


class CapturedUpdates:
    """The updates of a run, one batch each.

    Args:
        size: samples of a full batch. pads: some batches are not full; then the loss is computed by sample.
    """

    def __init__(self, graph: Graph, updater: Updater, criterion: Criterion, size: int, pads: bool) -> None:
        self.graph, self.updater, self.criterion, self.size, self.pads = graph, updater, criterion, size, pads
        self.done = 0
        self.batch: Batch | None = None
        self.counted: torch.Tensor | None = None

    def update(self, run: Training, batch: Batch) -> None:
        """Run one update on a batch."""
        window = run.reporting.window
        run.strategy.prepare(batch)
        if run.watchers.ema is not None:
            run.watchers.ema.follow(run.progress.step)
        if not self.done:
            self.updater.rates_on_device()
        self._fill(batch)
        window.lr = run.strategy.lr
        self.updater.set_rates()
        work = partial(self._work, run)
        if self.done < WARM_UP:
            with self.graph.warm_up():
                work()
        else:
            if self.done == WARM_UP:
                self._capture(work)
            self.graph.replay()
        self.done += 1
        self.updater.steps += 1
        loss, outputs = self.loss.clone(), self.outputs[: batch.samples].clone()
        run.watchers.step_hook.after_forward(run, batch, loss)
        window.add(Loss(loss, batch.denominator), outputs, batch, keep=run.schedule.log_last_batch)

    def _work(self, run: Training) -> None:
        """Forward, backward and step, on the graph's own memory."""
        assert self.batch is not None
        self.criterion.counted = self.counted
        try:
            with run.strategy.accumulate(True):
                loss, outputs = forward(run, self.batch)
                run.strategy.backward(loss)
        finally:
            self.criterion.counted = None
        self.updater.apply()
        self.loss, self.outputs = loss.detach(), outputs.detach()

    def _capture(self, work: Callable[[], None]) -> None:
        try:
            self.graph.capture(work)
        except RuntimeError as error:
            raise RunFailed(
                f"the update cannot be captured as a CUDA graph: {first_line(error)}. Use execution.cuda_graph=false"
            ) from error

    def _fill(self, batch: Batch) -> None:
        """Copy a batch into the graph's memory, and pad it.

        Raises:
            RunFailed: it has other shapes or types than the first.
        """
        inputs, labels, n = batch.inputs, batch.labels, batch.samples
        assert isinstance(inputs, torch.Tensor), "inputs by name are refused before"
        if self.batch is None:
            self.batch = Batch(self._like(inputs), self._like(labels), self.size, update=self.size)
            if self.pads:
                self.counted = torch.zeros(self.size, dtype=torch.float64, device=labels.device)
        for own, new in ((self.batch.inputs, inputs), (self.batch.labels, labels)):
            assert isinstance(own, torch.Tensor)
            if own.shape[1:] != new.shape[1:] or own.dtype != new.dtype or not 0 < n <= self.size:
                raise RunFailed(
                    f"a batch of {tuple(new.shape)} {new.dtype} does not fit the captured update, which has "
                    f"{tuple(own.shape)} {own.dtype}. Use execution.cuda_graph=false"
                )
            own[:n].copy_(new)
            if n < self.size:
                own[n:].copy_(new[:1].expand_as(own[n:]))
        if self.counted is not None:
            self.counted[:n].fill_(1 / n)
            self.counted[n:].zero_()
        elif n < self.size:
            raise RunFailed(f"a batch has {n} samples, and the captured update has {self.size}")

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a full batch of such rows."""
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        memory = torch.channels_last if last else torch.contiguous_format
        shape = (self.size, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory)
