"""Refusals of strategy=sharded, which only its runs import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.config.instantiate import locate
from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema import ShardedStrategy
from trainer.errors import UserError
from trainer.host import hardware
from trainer.strategies.builtin import sparse_module

if TYPE_CHECKING:
    import torch

OF_WHOLE_MATRICES = ("Muon",)
"""Optimizers, ours and torch's, with a rule for whole matrices."""


def refuse(options: ShardedStrategy, config: RunConfig, workers: int) -> Iterator[UserError]:
    """Yield why this configuration cannot run with so many workers."""
    group = options.shard_group
    if workers == 1:
        why = "one worker has nobody to share the model with"
        yield UserError("strategy=sharded", why, "launch.nproc=2 (or strategy=single)")
    elif group is not None and (group < 2 or workers % group):
        why = f"{workers} workers do not make groups of {group}"
        instead = next(n for n in range(2, workers + 1) if workers % n == 0)
        yield UserError(f"strategy.shard_group={group}", why, f"strategy.shard_group={instead}")
    yield from _refuse_unused(options)
    if config.compile is True and not options.whole_model:
        why = "strategy=sharded gathers parameters between the parts that torch would compile as one"
        yield UserError("compile=true", why, "compile=false (or strategy=collective)")
    for key in ("param_dtype", "reduce_dtype"):
        if getattr(options, key) == "fp16" and config.precision != "fp16":
            why = "fp16 overflows above 65504 without a loss scale"
            yield UserError(f"strategy.{key}=fp16", why, f"strategy.{key}=bf16 (or precision=fp16)")
    if options.offload and (config.device == "cpu" or not hardware.gpus()):
        why = "without a GPU the model is in the memory of the host"
        yield UserError("strategy.offload=true", why, "strategy.offload=false")


def _refuse_unused(options: ShardedStrategy) -> Iterator[UserError]:
    """Refuse keys that the kind of shards has no use for."""
    whole, usual = options.whole_model, ShardedStrategy
    for key in ("wrap", "param_dtype", "offload") if whole else ("find_unused_parameters",):
        if (value := getattr(options, key)) != getattr(usual, key):
            why = "the model is whole on each worker" if whole else "all workers use the same parameters in a step"
            instead = f"strategy.{key}={spelled(getattr(usual, key))}"
            other = "strategy.shard=parameters" if whole else "strategy.shard=optimizer"
            what = f"strategy.{key}={spelled(value)}"
            yield UserError(what, f"with strategy.shard={options.shard} {why}", f"{instead} (or {other})")


def refuse_model(options: ShardedStrategy, model: torch.nn.Module, optimizer: Any) -> Iterator[UserError]:
    """Yield why this model cannot train with this optimizer."""
    if sparse := sparse_module(model):
        why = f"strategy=sharded shards dense parameters, and the gradients of {sparse} are sparse"
        yield UserError("strategy=sharded", why, "strategy=pserver_sync (or collective)")
    if options.whole_model:
        if why := locate("trainer.optim.separable:why_not")(optimizer):  # imports torch
            what, kind = "strategy.shard=optimizer", type(optimizer).__name__
            yield UserError(what, f"{kind} {why}", "strategy.shard=parameters (or strategy=collective)")
        return
    if type(optimizer).__name__ in OF_WHOLE_MATRICES:
        why = "strategy=sharded gives each worker a shard of a gradient, and Muon steps by whole matrices"
        other = "strategy.shard=optimizer (or strategy=collective, or optimizer=adamw)"
        yield UserError("optimizer=muon", why, other)
    try:
        locate("trainer.models.blocks:chosen")(model, options.wrap, "strategy.wrap")  # imports torch
    except UserError as error:
        yield error
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        why = f"FSDP cuts parameters along their first dimension, and {scalars[0]} has none"
        yield UserError("strategy=sharded", why, "strategy=collective (or a parameter of shape (1,))")
