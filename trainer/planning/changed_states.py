"""What else of a checkpoint's state depends on config keys that a resumed run has changed: the order of samples,
schedules, memories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import store
from trainer.config.keys import is_of, leaves
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.optim.schedules import is_plateau
from trainer.planning.callback_states import changes
from trainer.planning.measured_before import begin_anew, measures_of

if TYPE_CHECKING:
    from trainer.planning.plan import Plan

ORDER = ("seed", "limit_train_batches", "data", "sampler", "strategy.gradient_merge")
"""Keys, and groups of them, on which it depends which samples are in an update."""
SAME_ORDER = (
    "data.num_workers",
    "data.prefetch",
    "data.pin_memory",
    "data.cache",
    "data.cache_dir",
    "data.root",
    "data.download",
    "data.val_batch_size",
    "data.memory_limit_gib",
    "data.batch_size",
    "data.global_batch_size",
    "data.read",
    "data.mixup",
    "data.cutmix",
    "data.mix_probability",
    "data.flip",
    "data.augment",
    "data.randaugment_ops",
    "data.randaugment_magnitude",
    "data.erasing",
    "data.transforms",
    "sampler.pad",
)
"""Keys of those that leave the order as it is. (The size of a batch is compared by the samples of an update.)"""
ORDER_AT_SERVERS = (
    "optimizer.lr_factors",
    "optimizer.layer_decay",
    "optimizer.weight_decay",
    "optimizer.decay_norms_and_biases",
    "strategy.split_method",
    "strategy.slice_above",
)
"""Keys on which the order of the elements in a server's vector depends."""
MEMORIES = (("comm_hook", "powersgd"), ("wire", "int8"))
"""Options of strategies whose workers keep what they have left out of their gradients."""


def what_watches(config: RunConfig, plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything besides the optimizer that remembers something, and begins anew or goes on
    otherwise."""
    measures = measures_of(config, about.config)
    yield from begin_anew(measures, config)
    yield from changes(*(list(one.get("callbacks") or ()) for one in (measures.before, measures.now)))
    yield from changed_states(measures.now, plan, about)


def changed_states(now: Mapping[str, Any], plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything else that begins anew, or goes on under another config.

    Args:
        now: the config without secrets, as the checkpoint has that of before.
    """
    before = about.config
    changed = sorted(_changed(before, now))
    order = [key for key in changed if is_of(key, ORDER) and not is_of(key, SAME_ORDER)]
    if order and about.update:
        yield (
            f"the order of epoch {about.epoch}: after {order[0]} was changed, its rest has samples that came "
            f"already, and lacks others"
        )
    if "seed" in changed:
        yield (
            "the seed of the random generators: they go on as they were; the new seed counts for the order of "
            "samples and for augmentation"
        )
    yield from _schedule(before, now)
    told, strategy = (one.get("strategy", {}) for one in (before, now))
    for option, value in MEMORIES:
        if told.get(option) == value != strategy.get(option) and about.strategy == plan.strategy:
            yield (
                f"what workers have left out of their gradients (strategy.{option}={value}): it is not added to a "
                f"later update"
            )
    if float(told.get("delay_compensation") or 0.0) and (
        moved := [key for key in changed if is_of(key, ORDER_AT_SERVERS)]
    ):
        yield (
            f"the parameters that workers had pulled: {moved[0]} was changed, and a gradient of the first update "
            f"is not compensated"
        )
    if "strategy.powersgd.rank" in changed and strategy.get("comm_hook") == told.get("comm_hook") == "powersgd":
        yield "the factors of strategy.comm_hook=powersgd, which have another rank: they begin anew"


def check_ages(config: RunConfig, about: store.About) -> None:
    """The ages of table rows are counted as before, if any row goes by its age.

    Raises:
        UserError: they are not.
    """
    by, told = getattr(config.strategy, "evict_by", None), about.config.get("strategy", {}).get("evict_by")
    if about.servers and getattr(config.strategy, "evict_after", None) is not None and told not in (None, by):
        raise UserError(
            f"strategy.evict_by={by}",
            f"the ages of the checkpoint's rows are counted by {told}",
            f"strategy.evict_by={told} (or strategy.evict_after=null)",
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    old, new = dict(leaves(before, "")), dict(leaves(now, ""))
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}


def _schedule(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what becomes of the factor of scheduler=plateau, if only one of the two runs has that schedule."""
    was, is_ = (is_plateau(str(one.get("scheduler", {}).get("_target_"))) for one in (before, now))
    if was and not is_:
        yield "the factor to which scheduler=plateau had lowered the rate, and the validations that it has seen"
    if is_ and not was:
        yield "scheduler=plateau: begins anew, with the factor 1 and no validation"
