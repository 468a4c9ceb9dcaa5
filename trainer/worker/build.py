"""Builds everything that the training loop needs from the finished config."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.checkpoint.pinned import PinnedMemory
from trainer.config import redact
from trainer.config.instantiate import call_target, needs_skeleton
from trainer.config.redact import values
from trainer.config.run_config import RunConfig
from trainer.data.checked_splits import opened
from trainer.data.epoch_order import EpochOrder, epoch_order, needs_training_data
from trainer.data.evaluated_split import TEST, VAL
from trainer.data.feed import Feed
from trainer.data.placement import Placement
from trainer.data.reader import Reader, Reading
from trainer.data.sampler import EvaluationSampler, training_sampler, undivided_sampler
from trainer.data.source import Facts, Splits
from trainer.errors import RunFailed
from trainer.metrics.best import EarlyStop
from trainer.metrics.criterion import Criterion, labels_of, make_criterion, weights_of
from trainer.optim.schedules import is_plateau
from trainer.planning.class_names import of_data
from trainer.planning.plan import Plan
from trainer.planning.training_checks import balanced_keys
from trainer.run_folder.report import Report
from trainer.strategies.contract import ExpectsBatches, HoldsShards, LeasesWork, Scatters, Strategy
from trainer.strategies.seat import Seat
from trainer.tasks.contract import task_of
from trainer.worker.best_model import save_best
from trainer.worker.callbacks import made
from trainer.worker.model import Updaters, autocast, construct, prepared, type_of_bytes, without_values
from trainer.worker.nonfinite import STEP_HOOKS
from trainer.worker.settings import seed_all
from trainer.worker.training import Captured, FinalTest, LogWindow, Reporting, Schedule, Training, Watchers
from trainer.worker.user_strategy import check_abilities, check_set_up

if TYPE_CHECKING:
    from trainer.data.augment.mixing import Mixing
    from trainer.data.auto_num_workers import Growth
    from trainer.data.images.encoded import DeviceDecoder
    from trainer.data.leased_blocks import LeasedBatches, LeasedRows

UNLIMITED = 1 << 62


def build(config: RunConfig, plan: Plan, seat: Seat, strategy: Strategy, report: Report) -> Training:
    """Build the :class:`Training` of a worker from the finished config: model, strategy, feed, task and the rest."""
    check_abilities(config, plan, strategy)
    device = torch.device(seat.device)
    model, bare = _model(config, plan, seat, strategy)
    if plan.chosen.compiling.compile:
        from trainer.worker.compiled_model import compile_model

        compile_model(model, plan.chosen.compiling, config.execution.compile_backend)
    with _side_stream(plan, device):
        forward = strategy.setup(model, Updaters(config, plan))
    if config.mode == "train":  # evaluators have no optimizer
        check_set_up(strategy, forward)
    splits = opened(
        call_target(config.node("data"), "data"), of_data(plan.data.facts, plan.data.labels), *measured(config)
    )
    splits = _streamed(splits, config, plan, seat)
    if plan.data.facts.resident:
        splits = splits.resident(device, config.mode == "train", *measured(config))
    order = _make_order(config, plan.data.facts, splits)
    seed_all(config.seed + 1 + seat.rank)
    criterion = _make_criterion(config, plan, seat, splits)
    feed = _make_feed(config, plan, seat, strategy, splits, order, criterion)
    objective = task_of(config).objective(criterion, plan.data.facts, plan.data.labels)
    return Training(
        model=model,
        forward=forward,
        task=objective,
        strategy=strategy,
        feed=feed,
        autocast=autocast(plan.chosen.precision, device),
        lockstep=plan.strategy.traits.lockstep,
        schedule=_make_schedule(config, plan),
        watchers=_make_watchers(config, plan, seat, strategy, model),
        reporting=Reporting(report, LogWindow(objective), compiles=plan.chosen.compiling.compile),
        final_test=FinalTest(bare),
        captured=_make_captured(config, plan, device, strategy, criterion, feed) if plan.chosen.cuda_graph else None,
    )


def _model(config: RunConfig, plan: Plan, seat: Seat, strategy: Strategy) -> tuple[nn.Module, bytes | None]:
    """Build the model; returns it, and the user's own without weights. What a strategy will shard, the first worker
    alone builds with values, in the memory of the host."""
    device, own = torch.device(seat.device), config.mode == "train" and needs_skeleton(config.model)
    shards = isinstance(strategy, HoldsShards)
    if isinstance(strategy, HoldsShards) and strategy.sends_values and seat.rank and not own:
        empty = without_values(config, plan, device)
        if empty is not None:
            return empty, None
    model = construct(config)
    bare = _skeleton(model, config) if own else None
    return prepared(model, config, plan, device, torch.device("cpu") if shards else None), bare


def _side_stream(plan: Plan, device: torch.device) -> AbstractContextManager[None]:
    """Context manager: DDP is made on a stream of its own, as torch asks for where updates are captured."""
    if not plan.chosen.cuda_graph or plan.mode != "train":
        return nullcontext()
    from trainer.worker.captured import CudaGraph

    return CudaGraph(device).warm_up()


def _make_captured(
    config: RunConfig, plan: Plan, device: torch.device, strategy: Strategy, criterion: Criterion, feed: Feed
) -> Captured | None:
    """Make what captures updates; None in an evaluation."""
    if plan.mode != "train":
        return None
    from trainer.planning.cuda_graph import pads
    from trainer.worker.captured import CapturedUpdates, CudaGraph

    padded = pads(feed.sampler, plan.batches.size, config.limit_train_batches)
    return CapturedUpdates(CudaGraph(device), strategy.updater, criterion, plan.batches.size, padded)


def _skeleton(model: nn.Module, config: RunConfig) -> bytes | None:
    """Return the user's own model without weights, for the final test and for those who load the saved weights."""
    from trainer.models.skeleton import skeleton

    return skeleton(model, values(config.plain()) | redact.HERE.values)


def _make_watchers(config: RunConfig, plan: Plan, seat: Seat, strategy: Strategy, model: nn.Module) -> Watchers:
    """Make the :class:`Watchers` of the run. An evaluation has no early stop, no averaged weights and no best model."""
    run_dir = Path(plan.paths.run_dir)
    together = plan.strategy.traits.lockstep and plan.strategy.traits.same_everywhere
    watchers = Watchers(
        step_hook=STEP_HOOKS[config.on_nonfinite](seat.rank, seat.size, together),
        callbacks=made(config.callbacks, seat.rank, seat.size, run_dir, plan.length.total_steps, model),
    )
    if config.metrics:
        from trainer.metrics.user_metrics import OwnMetrics

        watchers.user_metrics = OwnMetrics(config.metrics, torch.device(seat.device), task_of(config).scores)
    if plan.mode == "train":
        if (stop := config.early_stop).metric:
            watchers.early_stop = EarlyStop(stop.metric, stop.patience, stop.min_delta, plan.objective.lower)
        watchers.plateau = is_plateau(config.scheduler._target_)
        if config.ema.decay is not None:
            from trainer.optim.averaged import averaged_weights

            watchers.ema = averaged_weights(model, config.ema)
        watchers.average_ema = not plan.strategy.traits.same_everywhere
        watchers.save_best = partial(save_best, model, strategy, seat, run_dir, PinnedMemory())
    return watchers


def measured(config: RunConfig) -> tuple[bool, bool]:
    """Whether the validation samples, and the test samples, are measured."""
    if config.mode == "eval":
        return config.eval.split == VAL, config.eval.split == TEST
    return config.validation, config.test


def _make_schedule(config: RunConfig, plan: Plan) -> Schedule:
    """Make the :class:`Schedule` of the run. With leased work no worker knows its number of updates."""
    execution = config.execution
    return Schedule(
        epochs=plan.length.epochs,
        total_steps=UNLIMITED if plan.batches.leased else plan.length.total_steps,
        log_every=execution.log_every,
        val_every=execution.val_every,
        val_every_steps=execution.val_every_steps,
        validate=config.validation,
        log_last_batch=execution.line_of == "batch",
    )


def _make_criterion(config: RunConfig, plan: Plan, seat: Seat, splits: Splits) -> Criterion:
    """Make the worker's loss. Balanced weights are the plan's; a trial of batch sizes, which has none, computes
    them."""
    labels = labels_of(splits.train) if balanced_keys(config) and not plan.objective.class_weights else None
    known = {name: found[0] if name == "pos_weight" else found for name, found in plan.objective.class_weights.items()}
    weights = weights_of({**config.loss, **known}, plan.data.facts.classes, labels)
    dtype = torch.float64 if plan.chosen.precision == "fp64" else torch.float32
    return make_criterion(config.loss, weights, plan.objective.denominator, torch.device(seat.device), dtype)


def _make_feed(
    config: RunConfig,
    plan: Plan,
    seat: Seat,
    strategy: Strategy,
    splits: Splits,
    order: EpochOrder,
    criterion: Criterion,
) -> Feed:
    """Make the feed of this worker's batches."""
    facts, chosen, tested = plan.data.facts, plan.chosen, measured(config)[1] and splits.test is not None
    readers, prefetch = int(chosen.num_workers), int(chosen.prefetch)
    mixing, decoder = _make_mixing(config, facts), None
    if chosen.decode == "gpu":
        decoder, splits, mixing = _make_decoder(splits, mixing, seat)
    pinned = chosen.pin_memory and seat.device.startswith("cuda")
    reading = Reading(config.seed, readers, prefetch, pinned, mixing)
    dtype, device = torch.float64 if chosen.precision == "fp64" else torch.float32, torch.device(seat.device)
    return Feed(
        splits,
        training_sampler(config, facts.train_samples, plan.batches.size, seat.rank, seat.size, order),
        EvaluationSampler(facts.val_samples, plan.batches.val_size, seat.rank, seat.size),
        Placement(splits, device, dtype, chosen.channels_last, type_of_bytes(chosen.precision, device)),
        merge=plan.batches.merge,
        average=config.strategy.gradient_merge.avg,
        reading=reading,
        limit_train=config.limit_train_batches,
        limit_val=config.limit_val_batches,
        expect=strategy.expect if isinstance(strategy, ExpectsBatches) else None,
        work=_leased_work(config, plan, splits, reading, strategy, order),
        scatter=strategy.scatter if isinstance(strategy, Scatters) and config.data.read == "scatter" else None,
        growth=_make_growth(config, readers, prefetch, seat),
        test=EvaluationSampler(facts.test_samples, plan.batches.val_size, seat.rank, seat.size) if tested else None,
        outputs=plan.data.labels,
        denominator=criterion.denominator,
        decoder=decoder,
    )


def _streamed(splits: Splits, config: RunConfig, plan: Plan, seat: Seat) -> Splits:
    """Turn the streams among a worker's data sets into data sets with positions; others are returned as they are.

    Raises:
        RunFailed: the training data are no stream, or one that cannot be read as ``data.shard`` says.
    """
    facts, data = plan.data.facts, config.data
    if not facts.iterable:
        return splits
    from trainer.data.streamed import Streamed, StreamShare, is_stream

    name, train, val, test = str(data._target_), splits.train, splits.val, splits.test
    if plan.mode == "train":
        if not is_stream(train):
            raise RunFailed(
                f"{name}: its facts say iterable=True, and the training data ({type(train).__name__}) are no "
                f"stream. Return an IterableDataset, or a function that returns an iterator"
            )
        part = StreamShare(
            data.shard, seat.rank, seat.size, plan.batches.global_size, facts.train_samples, data.shuffle_buffer
        )
        train = Streamed(train, f"{name}, the training stream", facts, facts.shape, part)
    if is_stream(val):
        val = Streamed(val, f"{name}, the validation stream", facts, facts.val_shape or facts.shape)
    if is_stream(test):
        test = Streamed(test, f"{name}, the test stream", facts, facts.val_shape or facts.shape)
    return replace(splits, train=train, val=val, test=test)


def _leased_work(
    config: RunConfig, plan: Plan, splits: Splits, reading: Reading, strategy: Strategy, order: EpochOrder
) -> LeasedBatches | LeasedRows | None:
    """Make the worker's training data in blocks that the strategy leases; None if it is split beforehand."""
    if not plan.batches.leased or not isinstance(strategy, LeasesWork):
        return None
    from trainer.data.leased_blocks import LeasedBatches, LeasedRows

    size = plan.batches.size
    if plan.data.facts.streams:
        return LeasedRows(splits.train, size, config.seed, config.sampler.shuffle, strategy.leases)
    everything = undivided_sampler(config, plan.data.facts.train_samples, size, order)
    workers, limit = plan.topology.workers, config.limit_train_batches
    updates = config.max_steps * workers if config.max_steps else None
    return LeasedBatches(
        Reader(splits.train, reading),
        everything,
        plan.batches.lease_batches,
        limit and limit * workers,
        plan.batches.merge,
        updates,
        strategy.leases,
    )


def _make_growth(config: RunConfig, readers: int, prefetch: int, seat: Seat) -> Growth | None:
    """Make what decides on more reading processes; None without reading processes, or for a fixed number of them."""
    if not readers:
        return None
    from trainer.data.auto_num_workers import growing_readers

    return growing_readers(config.data, readers, prefetch, seat.local_size)


def _make_decoder(splits: Splits, mixing: Mixing | None, seat: Seat) -> tuple[DeviceDecoder, Splits, None]:
    """Make the decoder of training images on the GPU, which mixes the batches too, and the splits whose training images
    are read encoded."""
    from trainer.data.images.dataset import ImageSet
    from trainer.data.images.encoded import DeviceDecoder, EncodedImages

    assert isinstance(splits.train, ImageSet)
    encoded = EncodedImages(splits.train.listing, splits.train.view)
    return DeviceDecoder(encoded, mixing, torch.device(seat.device)), replace(splits, train=encoded), None


def _make_order(config: RunConfig, facts: Facts, splits: Splits) -> EpochOrder:
    """Make the epoch's order of samples that the config's sampler asks for."""
    needed = needs_training_data(config)
    return epoch_order(config, facts.train_samples, splits.train, labels_of(splits.train) if needed else None)


def _make_mixing(config: RunConfig, facts: Facts) -> Mixing | None:
    """Make the mixup and CutMix of training batches that the config asks for; None if it asks for none."""
    data = config.node("data")
    mixup, cutmix = data.get("mixup", 0.0), data.get("cutmix", 0.0)
    if not (mixup or cutmix):
        return None
    from trainer.data.augment.mixing import Mixing

    mixing = Mixing(mixup, cutmix, data.get("mix_probability", 1.0), facts.classes)
    return mixing if mixing.active else None
