"""Whether a resumed run may compare a metric with the values before: whether it measures the same thing on the same
samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.keys import is_of, leaves, spelled
from trainer.config.run_config import RunConfig
from trainer.metrics.best import AVERAGED, RAW
from trainer.optim.schedules import is_plateau
from trainer.planning.config_before import public
from trainer.tasks.contract import best_metric, task_of

TRAINING_ALONE = (
    "data.batch_size",
    "data.global_batch_size",
    "data.val_batch_size",
    "data.memory_limit_gib",
    "data.num_workers",
    "data.prefetch",
    "data.pin_memory",
    "data.cache",
    "data.cache_dir",
    "data.root",
    "data.download",
    "data.read",
    "data.work",
    "data.lease_batches",
    "data.steps_per_epoch",
    "data.shard",
    "data.shuffle_buffer",
    "data.on_lost_worker",
    "data.mixup",
    "data.cutmix",
    "data.mix_probability",
    "data.flip",
    "data.augment",
    "data.randaugment_ops",
    "data.randaugment_magnitude",
    "data.erasing",
    "data.min_scale",
    "data.min_ratio",
    "data.train_resize",
    "data.transforms",
    "data.pad_crop",
    "data.block_mib",
    "data.chunk_rows",
    "data.verify",
    "data.max_pixels",
    "data.max_label_kib",
    "data.max_bad_fraction",
    "data.on_missing",
    "data.order",
    "data.test_path",
)
"""Keys of the data that say nothing about the samples of a validation."""
LOSS, LIMIT = "loss", "limit_val_batches"


@dataclass(frozen=True)
class Measures:
    """What the metrics of a resumed run measure, against those of the run before.

    Attributes:
        before, now: the two configs, without secrets.
        other_data: the data's fingerprint is another one.
    """

    before: Mapping[str, Any]
    now: Mapping[str, Any]
    other_data: bool = False

    def why_not(self, metric: str) -> str:
        """Why values of a metric cannot be compared with those before: what differs; empty: they can be."""
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
            key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not is_of(key, TRAINING_ALONE)
        ]
        return f"{changed[0]} was {spelled(old.get(changed[0]))}" if changed else ""

    def anew(self, key: str, metric: str, usual: str = "") -> str:
        """Why what watches a metric begins anew; empty: it goes on.

        Args:
            key: that names the metric, e.g. ``early_stop.metric``.
            usual: the metric where the key is null.
        """
        before = _at(self.before, key) or usual
        return f"{key} was {spelled(before)}" if before and before != metric else self.why_not(metric)


def measures_of(config: RunConfig, before: Mapping[str, Any], other_data: bool = False) -> Measures:
    """The :class:`Measures` of a run against a checkpoint's config, which is without secrets."""
    return Measures(before, public(config), other_data)


def is_other(before: str, now: str) -> bool:
    """Whether two fingerprints are of other data; empty: it was not taken."""
    return bool(before and now and before != now)


def _at(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _values(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values below a key by their dotted keys. Null is as good as a key that an older trainer did not have."""
    return {key: value for key, value in leaves({path: _at(config, path)}, "") if value is not None}


def begin_anew(measures: Measures, config: RunConfig) -> Iterator[str]:
    """Yield one line for everything that remembers the best value of a validation metric, and begins anew."""
    found = [
        ("best.metric", best_metric(config), RAW + task_of(config).best, "the best model so far"),
        ("early_stop.metric", config.early_stop.metric, "", "the early stop's best value and the validations waited"),
    ]
    if is_plateau(config.scheduler._target_):
        metric = str(config.node("scheduler").get("metric"))
        what = "the best value of scheduler=plateau and the validations waited (its factor stays)"
        found.append(("scheduler.metric", metric, "", what))
    for key, watched, usual, what in found:
        remembered = usual or _at(measures.before, key)  # nothing is lost of what watched nothing
        if config.validation and watched and remembered and (why := measures.anew(key, watched, usual)):
            yield f"{what}: begins anew with {watched}, because {why}"
