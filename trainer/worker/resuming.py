"""Puts a worker back where a checkpoint has it, also one of another number of workers or of another strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import store
from trainer.checkpoint.tensor_tree import read
from trainer.models.empty_batch import counting
from trainer.optim.updater import Updater
from trainer.planning.resume_changes import Measures, completed, moved
from trainer.strategies.contract import Rehearses, SavesPieces
from trainer.strategies.replicas import HasReplicas
from trainer.strategies.seat import Seat
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.state import WorkerState, load_state, randomness
from trainer.worker.state_conversion import averaged, for_servers, from_servers
from trainer.worker.training import Training
from trainer.worker.training_log import merged_window


def resume(run: Training, folder: Path, seat: Seat, config: Mapping[str, Any] | None = None, data: str = "") -> None:
    """Restore a worker's state from a checkpoint.

    Args:
        config: of the run, without secrets; None: it is the checkpoint's.
        data: the fingerprint of the run's data; empty: it has none.
    """
    if isinstance(run.strategy, Rehearses) and run.strategy.rehearses():
        _rehearse(run)
    first = WorkerState(**read(folder / store.parts(folder)[0], stored=isinstance(run.strategy, SavesPieces)))
    about, servers = store.about(folder), run.strategy.seat.others.servers
    own = _own(folder, first, seat, about.workers, run)
    if bool(about.servers) != bool(servers):
        first = for_servers(run, first) if servers else from_servers(run, folder, first)
        own = replace(own, model=None, own={})
    if about.workers != seat.size and isinstance(run.strategy, HasReplicas):
        first = averaged(run.strategy, folder, first)
        own = replace(own, model=None, own=first.own)
    config = about.config if config is None else config
    before = completed(about.config, config)
    nodes = [list(one.get("callbacks") or ()) for one in (before, config)]
    load_state(run, folder, replace(own, callbacks=moved(own.callbacks, *nodes)), first)
    _forget(run, Measures(before, config, bool(about.data and data and about.data != data)))
    run.progress.stop = _stops(run, before, config)
    if isinstance(run.watchers.checkpoints, Checkpoints):
        run.watchers.checkpoints.saved, run.watchers.checkpoints.saved_after = about.step, run.progress.step
    if seat.rank == 0:
        print(f"goes on from {folder} after update {run.progress.step}", flush=True)


def _own(folder: Path, first: WorkerState, seat: Seat, before: int, run: Training) -> WorkerState:
    """This worker's part. With another number of workers than before, the batches of the current log window are shared
    out. So are the samples that workers without a common step count each. A new worker has the first one's buffers and
    new random numbers.

    Args:
        before: how many workers there were.
    """
    names = store.parts(folder)
    own_parts = [name for worker in range(seat.rank, before, seat.size) if (name := store.part_of(worker)) in names]
    parts = [first if name == names[0] else WorkerState(**read(folder / name)) for name in own_parts]
    window = merged_window([part.window for part in parts], first.window, run.lockstep, run.task)
    progress = (parts or [first])[0].progress
    if not run.lockstep:
        progress = {**progress, "samples": sum(part.progress["samples"] for part in parts)}
    if not parts:
        drawn = randomness(torch.device(seat.device))
        return replace(first, model=None, batches=[], window=window, progress=progress, randomness=drawn)
    batches = [batch for part in parts for batch in part.batches]
    return replace(parts[0], batches=batches, window=window, progress=progress)


def _rehearse(run: Training) -> None:
    """Run the first forward and backward once and discard them, before a worker loads a checkpoint."""
    for _, batches in run.feed.updates(0):
        batch = next(batches)
        with run.strategy.accumulate(True), counting(run.model, batch.samples):
            with run.autocast():
                loss, _ = run.task.forward(run.forward.train(), batch.inputs, batch.labels, batch.denominator)
            run.strategy.backward(loss)
        run.forward.zero_grad(set_to_none=True)
        return


def _forget(run: Training, measures: Measures) -> None:
    """Forget best values of metrics that measured something else before the checkpoint."""
    run.reporting.report.forget(measures.why_not)
    early_stop, updater = run.watchers.early_stop, getattr(run.strategy, "updater", None)
    if early_stop is not None and measures.anew("early_stop.metric", early_stop.best.metric):
        early_stop.forget()
    plateau = updater.plateau if isinstance(updater, Updater) else None
    if plateau is not None and measures.anew("scheduler.metric", plateau.best.metric):
        plateau.forget()


def _stops(run: Training, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why the run stops, as an early stop or a callback decided before the checkpoint; with another config both decide
    anew."""
    if before.get("callbacks") != now.get("callbacks") and run.watchers.callbacks:
        run.watchers.callbacks.forget_stop()
        run.reporting.window.stop_asked = False
    reason = run.watchers.callbacks.agreed if run.watchers.callbacks else ""
    if run.watchers.early_stop is not None and before.get("early_stop") == now.get("early_stop"):
        return run.watchers.early_stop.reason(run.progress.validated[0]) or reason
    return reason
