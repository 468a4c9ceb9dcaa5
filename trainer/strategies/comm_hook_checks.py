"""What ``strategy.comm_hook`` and its options mean for a run, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema import CollectiveStrategy
from trainer.config.schema.strategy import DgcOptions, PowerSgdOptions
from trainer.errors import UserError
from trainer.wording import counted, sized

PLACE_BYTES = 4
"""Bytes of the place of a value."""


def exchange(strategy: CollectiveStrategy, sizes: Sequence[int], size: int) -> str:
    """What the workers exchange, in words.

    Args:
        sizes: numbers of each trained parameter. size: bytes of a number.
    """
    hook, options, whole = strategy.comm_hook, strategy.dgc, sum(sizes) * size
    if strategy.reduce_group:
        near = f"{sized(whole)} of gradients among {counted(strategy.reduce_group, 'worker')}"
        return f"{near}, and {sized(whole / strategy.reduce_group)} of each worker between these groups"
    if hook in ("fp16", "bf16"):
        return f"{sized(sum(sizes) * 2)} of gradients of each worker in an update, instead of {sized(whole)}"
    large = [numbers for numbers in sizes if numbers >= options.min_size]
    if hook != "dgc" or not large:
        return ""
    sent = sum(max(1, int(numbers * (1 - options.sparsity[-1]))) for numbers in large)
    rest, shares = sum(sizes) - sum(large), len(options.sparsity)
    last = options.rampup_begin_step + -(-options.rampup_step * (shares - 1) // shares)
    return (
        f"{sized(sent * (size + PLACE_BYTES) + rest * size)} of each worker in an update, from update {last} on, "
        f"instead of {sized(whole)}: {sent:,} of {sum(large):,} numbers of {counted(len(large), 'parameter')}, the "
        f"rest whole"
    )


def concern(strategy: CollectiveStrategy, sizes: Sequence[int]) -> str:
    """A warning where most of the model is too small to be compressed; usually empty."""
    least = strategy.dgc.min_size
    small = sum(numbers for numbers in sizes if numbers < least)
    if strategy.comm_hook != "dgc" or not sizes or small <= sum(sizes) / 2:
        return ""
    return (
        f"strategy.comm_hook=dgc compresses parameters of {least:,} numbers and more (Lin et al., 2018), and "
        f"{100 * small / sum(sizes):.0f}% of this model are in smaller ones, which go whole (strategy.dgc.min_size)"
    )


def refuse(strategy: CollectiveStrategy, config: RunConfig, workers: int) -> Iterator[UserError]:
    """Yield every reason why the hook and its options cannot work with a config."""
    hook = f"strategy.comm_hook={strategy.comm_hook}"
    if strategy.comm_hook != "none" and workers == 1:
        yield UserError(hook, "one worker exchanges no gradients", "strategy.comm_hook=none (or launch.nproc=2)")
    for own, defaults in (("powersgd", PowerSgdOptions()), ("dgc", DgcOptions())):
        for name, default in asdict(defaults).items() if own != strategy.comm_hook else ():
            if (value := getattr(getattr(strategy, own), name)) != default:
                why = f"with {hook} nothing is compressed that way"
                yield UserError(f"strategy.{own}.{name}={spelled(value)}", why, f"strategy.comm_hook={own}")
    yield from _refuse_ways(strategy, workers)
    if strategy.comm_hook not in ("powersgd", "dgc"):
        return
    if config.precision == "fp16":
        why = "what it leaves out of a gradient is added to the next, and with fp16 each has a scale of its own"
        yield UserError("precision=fp16", f"{hook}: {why}", "precision=bf16 (or strategy.comm_hook=fp16)")
    powersgd = strategy.comm_hook == "powersgd"
    key = "powersgd.start_step" if powersgd else "dgc.rampup_begin_step"
    begins = strategy.powersgd.start_step if powersgd else strategy.dgc.rampup_begin_step
    if config.max_steps is not None and begins >= config.max_steps:
        why = f"with max_steps={config.max_steps} no gradient would be compressed"
        instead = max(2, config.max_steps // 10) if powersgd else config.max_steps // 10
        yield UserError(f"strategy.{key}={begins}", why, f"strategy.{key}={instead}")
    if not powersgd:
        yield from _refuse_dgc(strategy)


def _refuse_ways(strategy: CollectiveStrategy, workers: int) -> Iterator[UserError]:
    group = strategy.reduce_group
    if strategy.comm_streams > 1 and workers == 1:
        why = "one worker exchanges no gradients"
        yield UserError(f"strategy.comm_streams={strategy.comm_streams}", why, "strategy.comm_streams=1")
    if group and (workers % group or group >= workers):
        fitting = [number for number in range(2, workers) if workers % number == 0]
        why = f"{counted(workers, 'worker')} are no groups of {group}"
        instead = " or ".join(f"strategy.reduce_group={n}" for n in [*fitting[-2:], "null"])
        yield UserError(f"strategy.reduce_group={group}", why, instead)
    if strategy.comm_hook != "none" and (group or strategy.comm_streams > 1):
        what = f"strategy.reduce_group={group}" if group else f"strategy.comm_streams={strategy.comm_streams}"
        why = f"strategy.comm_hook={strategy.comm_hook} exchanges gradients in its own way"
        yield UserError(what, why, "strategy.comm_hook=none")


def _refuse_dgc(strategy: CollectiveStrategy) -> Iterator[UserError]:
    for limit in ("clip_norm", "clip_value"):
        if (value := getattr(strategy, limit)) is not None:
            why = "with strategy.comm_hook=dgc no worker sees the whole gradient of an update"
            yield UserError(f"strategy.{limit}={value}", why, f"strategy.dgc.clip_norm={value}")
    if strategy.find_unused_parameters:
        why = "strategy.comm_hook=dgc sends what it has kept of a parameter also in updates that do not use it"
        yield UserError("strategy.find_unused_parameters=true", why, "strategy.comm_hook=none")


def refuse_optimizer(optimizer: Any) -> Iterator[UserError]:
    """Yield the reason why DGC cannot take over an optimizer's momentum."""
    if (kind := type(optimizer).__name__) != "SGD":
        why = f"it corrects the momentum of SGD, and the optimizer is {kind}"
        yield UserError("strategy.comm_hook=dgc", why, "optimizer=momentum (or strategy.comm_hook=powersgd)")
    elif any(group.get("dampening") for group in optimizer.param_groups):
        why = "strategy.comm_hook=dgc adds each gradient to the momentum whole"
        yield UserError("optimizer.dampening", why, "+optimizer.dampening=0")
