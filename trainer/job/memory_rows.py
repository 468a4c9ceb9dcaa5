"""Row of the plan table about memory: what a worker holds, and what a batch takes beside that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.schema import ShardedStrategy
from trainer.job.ready import Ready
from trainer.wording import counted, sized

KEPT = ("SGD Lars", "Adagrad RMSprop Lion Muon ScheduleFreeSgd", "Adam AdamW Lamb ScheduleFreeAdamW")
SLOTS = {name: numbers for numbers, names in enumerate(KEPT) for name in names.split()}
"""Numbers that an optimizer keeps for each parameter; Muon two for those that it leaves to AdamW."""
TRAINS_OTHERS = ("ScheduleFreeSgd", "ScheduleFreeAdamW")
"""Optimizers with one more number in a checkpoint: the trained weights, beside those that count."""
MOVED = ("SGD", "RMSprop", "Lars")
"""Optimizers that keep one more number with momentum."""
MOST_SLOTS = 2
"""Numbers for an optimizer that is not in ``SLOTS``."""


def memory_row(ready: Ready) -> Iterator[tuple[str, str]]:
    """Yield the row, with ``plan=true`` and where workers hold shards. With ``plan=true`` the model runs once without
    values, which tells what a batch takes. (Workers of parameter servers have the row with ``verbosity=debug`` alone.)
    """
    config, plan = ready.checked.config, ready.plan
    if plan.mode != "train" or not (config.plan or isinstance(config.strategy, ShardedStrategy)):
        return
    if plan.strategy.traits.tables_at_servers and config.verbosity != "debug":
        return
    held, batch, total = _held(ready), 0, ""
    if config.plan:
        batch = of_a_batch(ready)
        of_batch = {f"for a batch of {counted(plan.batches.size, 'sample')}": batch}
        held = {**held, "of parameters that are gathered": _gathered(ready), **of_batch}
        total = f"about {sized(sum(held.values()))} on " if batch else ""
    parts = ", ".join(f"{sized(size)} {what}" for what, size in held.items() if size)
    brief = total and config.verbosity != "debug" and not isinstance(config.strategy, ShardedStrategy)
    yield "memory", f"{total}each worker" if brief else f"{total}each worker: {parts}"


def of_a_batch(ready: Ready) -> int:
    """Bytes that a batch takes in a forward and a backward; 0: not known."""
    from trainer.worker import batch_memory  # imports torch

    plan, checked = ready.plan, ready.checked
    return batch_memory.of_a_batch(
        checked.config, checked.facts, plan.chosen.precision, checked.device, plan.batches.size
    )


def of_a_worker(ready: Ready) -> float:
    """Bytes that a worker holds in an update beside its batch."""
    return sum(_held(ready).values()) + _gathered(ready)


def _held(ready: Ready) -> dict[str, float]:
    """Bytes that a worker holds in an update, by what they are."""
    plan, model, config = ready.plan, ready.model, ready.checked.config
    parameters, trained = float(model.parameters), float(model.trained)
    state = slots(config.node("optimizer")) * trained
    if plan.strategy.traits.tables_at_servers:
        parameters, trained, state = parameters - model.in_tables, trained - model.in_tables, 0.0
    group, cut = plan.topology.workers, False
    if isinstance(config.strategy, ShardedStrategy):
        group, cut = config.strategy.shard_group or group, not config.strategy.whole_model
        if not cut:
            from trainer.strategies.owners import most

            sizes = {name: math.prod(shape) for name, shape in model.shapes.items() if name not in model.frozen}
            state *= most(sizes, group) / max(1, sum(sizes.values()))
    numbers = {
        "of parameters": parameters,
        "of gradients": trained,
        "of optimizer state": state,
        "of averaged weights": parameters if config.ema.decay is not None else 0.0,
    }
    if cut:
        numbers = {f"{what} (1/{group})": number / group for what, number in numbers.items()}
    each = 8 if plan.chosen.precision == "fp64" else 4
    return {what: number * each for what, number in numbers.items()}


def _gathered(ready: Ready) -> float:
    """Bytes of parameters that a worker holds whole while a block computes, where workers hold shards of them."""
    config = ready.checked.config
    if not isinstance(config.strategy, ShardedStrategy) or config.strategy.whole_model:
        return 0.0
    from trainer.worker import batch_memory  # imports torch

    numbers = batch_memory.gathered(config, config.strategy.wrap, config.strategy.shard == "gradients")
    each = 8 if ready.plan.chosen.precision == "fp64" else 4
    return float(numbers * (each if config.strategy.param_dtype == "full" else 2))


def slots(optimizer: Mapping[str, Any]) -> int:
    """Numbers that the optimizer keeps for each parameter."""
    name = str(optimizer.get("_target_", "")).rpartition(".")[2]
    return SLOTS.get(name, MOST_SLOTS) + (name in MOVED and bool(optimizer.get("momentum")))


def saved_slots(optimizer: Mapping[str, Any]) -> int:
    """Numbers of the optimizer in a checkpoint for each parameter."""
    return slots(optimizer) + (str(optimizer.get("_target_", "")).rpartition(".")[2] in TRAINS_OTHERS)
