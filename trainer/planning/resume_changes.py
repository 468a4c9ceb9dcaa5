"""State of a checkpoint that begins anew, or goes on otherwise, because the resumed run has another config.

The two configs are compared without secrets, and with the keys of today. A metric is compared with earlier values only
if it measures the same thing on the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint import store
from trainer.config.keys import is_of, leaves, sections, spelled
from trainer.config.redact import hide, values
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.metrics.best import AVERAGED, RAW
from trainer.optim.schedules import is_plateau
from trainer.planning.plan import Plan
from trainer.planning.user_class_checks import callback_name
from trainer.tasks.contract import best_metric, task_of

OF_THE_COMMAND = ("resume", "plan", "launch.wait", "launch.dry_run", "launch.apply")
"""Keys of a command, not of the training."""
HARMLESS = (
    "on_nonfinite",
    "max_rewinds",
    "name",
    "verbosity",
    "debug",
    "profile",
    "tracking",
    "checkpoint",
    "launch",
    "predict",
    "task.threshold",
    "device",
    "data.batch_size",
    "data.global_batch_size",
    "data.num_workers",
    "data.prefetch",
    "data.pin_memory",
    "data.cache",
    "data.decode",
    "data.root",
    "sampler.pad",
    "model.head",
    "test",
    "eval",
    "sweep",
    "execution.keep_memory",
    "execution.threads",
    "execution.log_every",
    "execution.log_workers",
    "execution.line_of",
    "execution.profile_after",
    "execution.profile_steps",
)
"""Keys, and groups of them, that may differ: no result depends on them, or the plan lists the difference itself."""
SAME_ORDER = (
    *HARMLESS,
    "data.cache_dir",
    "data.download",
    "data.val_batch_size",
    "data.memory_limit_gib",
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
)
"""And keys with which the same training samples come in the same order. (Batch sizes are compared by the samples of an
update.)"""
SAME_VALIDATION = (
    *SAME_ORDER,
    "data.work",
    "data.lease_batches",
    "data.steps_per_epoch",
    "data.shard",
    "data.shuffle_buffer",
    "data.on_lost_worker",
    "data.min_scale",
    "data.min_ratio",
    "data.train_resize",
    "data.pad_crop",
    "data.block_mib",
    "data.verify",
    "data.max_pixels",
    "data.max_label_kib",
    "data.max_bad_fraction",
    "data.on_missing",
    "data.order",
    "data.test_path",
)
"""And keys with which a validation measures the same samples."""
CLIPS = ("strategy.clip_norm", "strategy.clip_value")


def public(config: RunConfig) -> dict[str, Any]:
    """A run's config without its secrets, as checkpoints have it."""
    plain = config.plain()
    return hide(plain, values(plain))  # type: ignore[no-any-return]


def completed(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return an older config with the keys that it lacks and that have their defaults now: the older trainer did what
    the default does.

    Args:
        now: the config with which it is compared.
        prefix: the dotted key under which both are.
    """
    full = dict(before)
    for name, value in now.items():
        path, inside = f"{prefix}{name}", before.get(name, {})
        if isinstance(value, Mapping) and isinstance(inside, Mapping):
            if part := completed(inside, value, f"{path}."):
                full[name] = part
        elif name not in before and any(k.default == value for s in sections() for k in s.keys if k.path == path):
            full[name] = value
    return full


def differences(before: Mapping[str, Any], now: Mapping[str, Any], other_strategy: bool) -> Iterator[tuple[str, str]]:
    """Yield each config key whose value differs, and how.

    Left out are keys of the command alone, another strategy's own (not clipping), and new ones with their defaults.
    """
    old, new = dict(leaves(completed(before, now), "")), dict(leaves(now, ""))
    for key in sorted(old.keys() | new.keys()):
        own = other_strategy and key.startswith("strategy.") and key not in CLIPS
        if old.get(key) != new.get(key) and not own and not is_of(key, OF_THE_COMMAND):
            yield key, f"{key} was {old.get(key)}, is {new.get(key)}"


Nodes = Sequence[Mapping[str, Any]]


def places_before(before: Nodes, now: Nodes) -> list[int | None]:
    """For each callback, its place in the run before: of an equal one, else of one of the same class; None: new."""
    found: list[int | None] = [None] * len(now)
    for names in ((), ("_target_",)):  # all of it, then the class alone
        for number, node in enumerate(now):
            if found[number] is None:
                wanted = _some(node, names)
                places = (n for n, old in enumerate(before) if n not in found and _some(old, names) == wanted)
                found[number] = next(places, None)
    return found


def _some(node: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These keys of a config node; none: all."""
    return {name: value for name, value in node.items() if name in (names or node)}


def moved(states: Mapping[str, Any], before: Nodes, now: Nodes) -> dict[str, Any]:
    """Rename the saved states of callbacks to this run's names; other entries stay."""
    names = {callback_name(number, node) for number, node in enumerate(before)}
    kept = {name: state for name, state in states.items() if name not in names}
    for number, place in enumerate(places_before(before, now)):
        if place is not None and (name := callback_name(place, before[place])) in states:
            kept[callback_name(number, now[number])] = states[name]
    return kept


def changes(before: Nodes, now: Nodes) -> Iterator[str]:
    """Yield one line for each callback that begins anew, has other arguments than its state was made with, or is
    gone."""
    places = places_before(before, now)
    for number, (place, node) in enumerate(zip(places, now, strict=True)):
        if place is None:
            yield f"{callback_name(number, node)}: begins anew, because the checkpoint has no state of it"
        elif before[place] != node:
            yield f"{callback_name(number, node)}: goes on with the state that it had under its old arguments"
    for number, node in enumerate(before):
        if number not in places:
            yield f"the state of {callback_name(number, node)}, which this run does not have"


LOSS, LIMIT = "loss", "limit_val_batches"


@dataclass(frozen=True)
class Measures:
    """Compares what metrics measure in a resumed run and in the run before.

    Attributes:
        before, now: the two configs, without secrets.
        other_data: the data's fingerprint is another one.
    """

    before: Mapping[str, Any]
    now: Mapping[str, Any]
    other_data: bool = False

    def why_not(self, metric: str) -> str:
        """Why values of a metric cannot be compared with earlier ones: what differs; empty: they can be."""
        name = metric.rpartition("/")[2]
        if self.other_data:
            return "the data are others"
        for key in ("task", f"metrics.{name}", *((LOSS,) if name.endswith(LOSS) else ())):
            if _values(self.before, key) != _values(self.now, key):
                return f"{key} is another one"
        if metric.startswith(AVERAGED) and _at(self.before, "ema.decay") is None:
            return "there was no average of the weights"
        old, new = ({**_values(one, "data"), **_values(one, LIMIT)} for one in (self.before, self.now))
        changed = [
            key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not is_of(key, SAME_VALIDATION)
        ]
        return f"{changed[0]} was {spelled(old.get(changed[0]))}" if changed else ""

    def anew(self, key: str, metric: str, usual: str = "") -> str:
        """Why a watcher of a metric begins anew; empty: it goes on.

        Args:
            key: that names the metric, e.g. ``early_stop.metric``.
            usual: the metric where the key is null.
        """
        before = _at(self.before, key) or usual
        return f"{key} was {spelled(before)}" if before and before != metric else self.why_not(metric)


def measures_of(config: RunConfig, before: Mapping[str, Any], other_data: bool = False) -> Measures:
    """The :class:`Measures` of a run against a checkpoint's config, which is without secrets."""
    return Measures(before, public(config), other_data)


def _at(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _values(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values below a key, by dotted key. Null counts as a key that is not there."""
    return {key: value for key, value in leaves({path: _at(config, path)}, "") if value is not None}


def begin_anew(measures: Measures, config: RunConfig) -> Iterator[str]:
    """Yield one line for each watcher of a validation metric that forgets its best value."""
    found = [
        ("best.metric", best_metric(config), RAW + task_of(config).best, "the best model so far"),
        ("early_stop.metric", config.early_stop.metric, "", "the early stop's best value and the validations waited"),
    ]
    if is_plateau(config.scheduler._target_):
        metric = str(config.node("scheduler").get("metric"))
        what = "the best value of scheduler=plateau and the validations waited (its factor stays)"
        found.append(("scheduler.metric", metric, "", what))
    for key, watched, usual, what in found:
        remembered = usual or _at(measures.before, key)  # without a metric before, nothing is lost
        if config.validation and watched and remembered and (why := measures.anew(key, watched, usual)):
            yield f"{what}: begins anew with {watched}, because {why}"


ORDER = ("seed", "limit_train_batches", "data", "sampler", "strategy.gradient_merge")
"""Keys, and groups of them, on which it depends which samples are in an update."""
ORDER_AT_SERVERS = (
    "optimizer.lr_factors",
    "optimizer.layer_decay",
    "optimizer.weight_decay",
    "optimizer.decay_norms_and_biases",
    "strategy.split_method",
    "strategy.slice_above",
)
"""Keys on which the order of the elements in a server's vector depends."""
MEMORIES = (("comm_hook", "powersgd"), ("comm_hook", "dgc"), ("wire", "int8"))
"""Options of strategies whose workers keep what they have left out of their gradients."""


def what_watches(config: RunConfig, plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for each thing besides the optimizer that begins anew, or goes on otherwise."""
    measures = measures_of(config, about.config)
    yield from begin_anew(measures, config)
    yield from changes(*(list(one.get("callbacks") or ()) for one in (measures.before, measures.now)))
    yield from changed_states(measures.now, plan, about)


def changed_states(now: Mapping[str, Any], plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for each other state that begins anew, or goes on under another config.

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
    old_strategy, strategy = (one.get("strategy", {}) for one in (before, now))
    for option, value in MEMORIES:
        if old_strategy.get(option) == value != strategy.get(option) and about.strategy == plan.strategy.name:
            yield (
                f"what workers have left out of their gradients (strategy.{option}={value}): it is not added to a "
                f"later update"
            )
    if float(old_strategy.get("delay_compensation") or 0.0) and (
        moved := [key for key in changed if is_of(key, ORDER_AT_SERVERS)]
    ):
        yield (
            f"the parameters that workers had pulled: {moved[0]} was changed, and a gradient of the first update "
            f"is not compensated"
        )
    if "strategy.powersgd.rank" in changed and strategy.get("comm_hook") == old_strategy.get("comm_hook") == "powersgd":
        yield "the factors of strategy.comm_hook=powersgd, which have another rank: they begin anew"


def check_ages(config: RunConfig, about: store.About) -> None:
    """Check that the ages of table rows are counted as before, if rows are evicted by age.

    Raises:
        UserError: they are not.
    """
    by, before = getattr(config.strategy, "evict_by", None), about.config.get("strategy", {}).get("evict_by")
    if about.servers and getattr(config.strategy, "evict_after", None) is not None and before not in (None, by):
        raise UserError(
            f"strategy.evict_by={by}",
            f"the ages of the checkpoint's rows are counted by {before}",
            f"strategy.evict_by={before} (or strategy.evict_after=null)",
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    old, new = dict(leaves(before, "")), dict(leaves(now, ""))
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}


def _schedule(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what becomes of the factor of scheduler=plateau if only one of the two runs has this schedule."""
    was, is_ = (is_plateau(str(one.get("scheduler", {}).get("_target_"))) for one in (before, now))
    if was and not is_:
        yield "the factor to which scheduler=plateau had lowered the rate, and the validations that it has seen"
    if is_ and not was:
        yield "scheduler=plateau: begins anew, with the factor 1 and no validation"
