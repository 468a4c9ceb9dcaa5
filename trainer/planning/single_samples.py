"""Finds training batches in which a worker has one sample, of which batch norm has no variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.run_config import RunConfig
from trainer.planning.checked_config import Checked

if TYPE_CHECKING:
    from trainer.data.sampler import TrainingSampler


@dataclass(frozen=True)
class SingleSample:
    """A batch of one sample: ``what`` makes it, ``why``, and what to type ``instead`` (empty: nothing is known)."""

    what: str
    why: str
    instead: str


def single_sample(checked: Checked) -> SingleSample | None:
    """Find a training batch in which a worker has one sample, or with ``sync_batch_norm`` all workers have one
    together; None: there is none, or the data's length is not known."""
    config, samples = checked.config, checked.facts.train_samples
    if config.mode != "train" or checked.searches or not _has_one(config, checked):
        return None
    size, together = config.batch_size, config.data.global_batch_size
    what = f"data.batch_size={size}" if together is None else f"data.global_batch_size={together}"
    synced = config.node("strategy").get("sync_batch_norm")
    who, least = (
        ("all workers together", 2 * checked.merge) if synced else ("a worker", 2 * checked.workers * checked.merge)
    )
    full = size * (checked.workers if synced else 1) == 1 if together is None else together < least
    why = (
        f"gives {who} batches of one sample"
        if full
        else f"leaves {who} one sample in the last batch of an epoch of {samples}"
    )
    wider = {"batch_size": size + 1} if together is None else {"global_batch_size": least}
    spelled = " ".join(f"data.{name}={value}" for name, value in wider.items())
    candidates = {
        "sampler.drop_last=true": config.changed(sampler={"drop_last": True}),
        spelled: config.changed(data=wider),
        f"{spelled} sampler.drop_last=true": config.changed(data=wider, sampler={"drop_last": True}),
    }
    works = (typed for typed, other in candidates.items() if _cuts(other, checked) and not _has_one(other, checked))
    return SingleSample(what, why, next(works, ""))


def _cuts(config: RunConfig, checked: Checked) -> list[set[int]]:
    """The numbers of samples of which batch norm takes a variance, in each of the first and the last batches of an
    epoch that are trained: those of each worker, or with ``sync_batch_norm`` of all together."""
    from trainer.data.sampler import training_sampler, undivided_sampler

    samples, workers = checked.facts.train_samples, checked.workers
    if checked.leased:
        workers = 1
        sampler: TrainingSampler = undivided_sampler(config, samples, config.batch_size)
    else:
        sampler = training_sampler(config, samples, config.batch_size, 0, workers)
    limits = [config.limit_train_batches, config.max_steps and config.max_steps * checked.merge]
    limit = None if checked.leased else min((one for one in limits if one), default=None)
    cuts, ends = list(sampler.cuts())[:limit], 2 * checked.merge
    shown = cuts if len(cuts) <= 2 * ends else [*cuts[:ends], *cuts[-ends:]]
    ranks = range(workers if config.sampler.shard else 1)
    shares = [[len(sampler.share(*cut, rank)) for rank in ranks] for cut in shown]
    if config.node("strategy").get("sync_batch_norm"):  # the variance is that of all workers' samples
        return [{sum(share) if config.sampler.shard else workers * sum(share)} for share in shares]
    return [set(share) for share in shares]


def _has_one(config: RunConfig, checked: Checked) -> bool:
    if checked.facts.streams or checked.facts.iterable:
        together = checked.workers if config.node("strategy").get("sync_batch_norm") else 1
        return config.batch_size * together == 1
    return any(1 in sizes for sizes in _cuts(config, checked))
