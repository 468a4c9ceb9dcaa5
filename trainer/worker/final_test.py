"""The test data: measured once, at the end of a training, with the weights of the best model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.store import BEST, CHECKPOINTS
from trainer.config.instantiate import for_saved_weights
from trainer.data.evaluated_split import TEST, EvaluatedSplit
from trainer.host.sharded import is_sharded, local, put
from trainer.metrics.best import TESTED
from trainer.models.skeleton import built
from trainer.planning.launcher import Assignment
from trainer.planning.plan import Plan
from trainer.run_folder.report import Phase
from trainer.strategies.contract import FullModel, Strategy, Traits
from trainer.strategies.seat import Seat
from trainer.weights import fit, tensor_files
from trainer.worker.model import construct, prepared
from trainer.worker.training import Training
from trainer.worker.validation import measure_split

PIECE = 1 << 20
"""Numbers of a tensor that workers of several hosts exchange at a time."""


def test(run: Training, assignment: Assignment, seat: Seat) -> None:
    """Measure the test data with the best model's weights. A collective call after the training.

    The final weights are measured if the run has no validations, or if tables of the best weights are only in servers.
    A finished run that is resumed keeps its measurement.

    Raises:
        Preempted: the run is asked to leave; its next life measures them.
    """
    report, progress = run.reporting.report, run.progress
    step, known = assignment.tested
    if known and run.lockstep and progress.step == step:
        report.test(progress.epoch, progress.step, known, "measured before: nothing was trained since")
        return
    report.phase = Phase.EVALUATION
    leavable = nullcontext() if run.watchers.checkpoints is None else run.watchers.checkpoints.validating(run)
    watched = report.watched
    with leavable:
        if not _has_best(run, assignment.plan):
            forgotten = assignment.plan.objective.best and watched.value is None
            measure(run, run.model, f"the model at the end{f', no best one by {watched.metric}' * bool(forgotten)}")
            return
        of = f"the best model, of update {watched.step} by {watched.metric}"
        if not _takes_weights(run, assignment.plan):
            measure(run, _second_model(run, assignment, seat), of)
            return
        run.final_test.trained = {
            n: local(t).to("cpu", copy=True) for n, t in run.model.state_dict().items() if isinstance(t, torch.Tensor)
        }
        _load_best(run, run.model, assignment.plan, seat)
        measure(run, run.model, of, settle=lambda: None)  # all have the same weights, which none is to replace
        run.final_test.restore_trained(run.model)


@torch.no_grad()
def measure(run: Training, model: nn.Module, of: str, settle: Callable[[], None] | None = None) -> torch.Tensor:
    """Measure the test data with a model and report ``test/...``; returns the task's sums over all workers.

    Args:
        of: which weights these are, in words.
        settle: called before on all workers; None: the strategy's ``synchronize``.
    """
    model.eval()
    with run.reporting.report.evaluating():
        sums, index, own = measure_split(run, settle or run.strategy.synchronize, TEST, model)
    run.reporting.set_writer(index == 0)
    found = {**run.task.validation(sums), **own}
    # what is known of the best that any model could reach is known of the validation data
    values = {f"{TESTED}{name}": value for name, value in found.items() if not name.endswith("_share")}
    run.reporting.report.test(run.progress.epoch, run.progress.step, values, of + _part(run.feed.evaluated[TEST]))
    return sums


def _part(split: EvaluatedSplit) -> str:
    """How much of a split is measured, in words; empty: all of it."""
    limit = split.limit
    whole = limit is None or (split.has_numbers and limit >= len(split.sampler))
    return "" if whole else f"; a part of the samples: limit_val_batches={limit}"


def _has_best(run: Training, plan: Plan) -> bool:
    """Whether there is a best model over all validations, by the watched metric, in a file that the first worker sees
    whole."""
    path = _path(plan)

    def known(index: int, count: int) -> bool:
        there = plan.objective.best and index == 0 and path.is_file() and not tensor_files.left_out(path)
        # a worker that was started again has not seen the validations before
        flags = torch.tensor([bool(there), run.reporting.report.watched.value is not None], dtype=torch.float64)
        return bool((run.strategy.all_reduce_sum(flags) > 0).all())

    return run.strategy.agree(known)


def _takes_weights(run: Training, plan: Plan) -> bool:
    """Whether the trained model can load the best weights, so that no second model is built beside the optimizer. It
    cannot if servers or other workers hold parts of it, or if it has buffers that are not saved: final buffers do not
    fit the best weights.
    """
    held = plan.strategy.traits.lockstep and plan.strategy.traits.skips and not isinstance(run.strategy, FullModel)
    return held and {name for name, _ in run.model.named_buffers()} <= set(run.model.state_dict())


def _second_model(run: Training, assignment: Assignment, seat: Seat) -> nn.Module:
    """Build the model once more, with its tables, and load the best weights."""
    config = assignment.config.replaced("model", for_saved_weights(assignment.config.model))
    bare = construct(config) if run.final_test.skeleton is None else built(run.final_test.skeleton)
    model = prepared(bare, config, assignment.plan.changed(strategy={"traits": Traits()}), torch.device(seat.device))
    _load_best(run, model, assignment.plan, seat)
    return model


def _load_best(run: Training, model: nn.Module, plan: Plan, seat: Seat) -> None:
    """Load the best weights on all workers; where there are several hosts, from the first worker."""
    if seat.size == seat.local_size:
        fit.load(_path(plan), model)
        return

    def shared(index: int, count: int) -> None:
        if index == 0:
            fit.load(_path(plan), model)
        _share(model, run.strategy, _path(plan) if index == 0 else None)

    run.strategy.agree(shared)


def _path(plan: Plan) -> Path:
    return Path(plan.paths.run_dir) / CHECKPOINTS / BEST


@torch.no_grad()
def _share(model: nn.Module, strategy: Strategy, path: Path | None) -> None:
    """Give all workers the first one's parameters and buffers, because other hosts may not see its files.

    Args:
        path: of the weights on the first worker, which has loaded them; None on the others.
    """
    first, sharded = path is not None, any(map(is_sharded, model.state_dict().values()))
    saved = tensor_files.read(path, str(path)) if path is not None and sharded else {}
    for name, live in model.state_dict().items():
        tensor = live
        if is_sharded(live):  # the first worker has kept its shard alone
            tensor = saved[name].to(live.dtype) if first else torch.zeros(live.shape, dtype=live.dtype)
        for piece in tensor.view(-1).split(PIECE) if tensor.is_contiguous() else [tensor]:
            values = piece.double().flatten().cpu()
            total = strategy.all_reduce_sum(values if first else torch.zeros_like(values))
            piece.copy_(total.view(piece.shape).to(piece.dtype))
        if tensor is not live:
            put(live, tensor)
