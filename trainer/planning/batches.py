"""The number of samples of an update (``data.batch_size``, ``data.global_batch_size``), and batches of one sample,
which batch norm refuses."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import is_each_once, sampler_name
from trainer.errors import UserError
from trainer.host import torchrun
from trainer.planning.checked_config import Checked
from trainer.wording import counted

AUTO = "auto"
STRIDED, CONTIGUOUS = "strided", "contiguous"
FIRST_TRY = 32
"""Samples per worker with which the search for the largest batch begins, and which a plan without one has."""


def searched(config: RunConfig, typed: set[str]) -> bool:
    """Whether ``data.batch_size`` is ``auto``. A typed ``data.global_batch_size`` goes before a recipe's ``auto``.

    Raises:
        UserError: the global batch is given as well, or not all workers are on this host.
    """
    data, launch, what = config.data, config.launch, "data.batch_size=auto"
    if config.mode != "train" or data.batch_size != AUTO:
        return False
    by_worker, together = "data.batch_size" in typed, "data.global_batch_size" in typed
    if data.global_batch_size is not None and together and not by_worker:
        return False
    if data.global_batch_size is not None and by_worker == together:
        why = f"finds the samples of an update, and data.global_batch_size={data.global_batch_size} sets them"
        raise UserError(what, why, "data.global_batch_size=null (or data.batch_size=null)")
    if launch.nnodes > 1:
        why = (
            "is searched for on one host, and the run has several: search with launch.nnodes=1, and give all "
            "hosts what is found"
        )
        raise UserError(what, why, f"data.batch_size={FIRST_TRY}")
    if torchrun.is_rank():
        why = f"starts processes for each try, and {torchrun.starter_of()} has started the run's already"
        raise UserError(what, why, f"python -m trainer ... launch.nproc=N without {torchrun.starter_of()}")
    return True


def at_most(config: RunConfig, samples: int, workers: int) -> RunConfig:
    """Return the config with a batch size no larger than each worker's share of the training data."""
    return config.changed(data={"batch_size": max(1, min(config.batch_size, most(config, samples, workers)))})


def most(config: RunConfig, samples: int, workers: int) -> int:
    """The largest ``data.batch_size`` that the training data allow; 0 if there is not one sample for each worker."""
    workers = workers if config.sampler.shard else 1
    return samples // workers if config.sampler.drop_last else -(-samples // workers)


def batch_sizes(
    data: schema.DataConfig, workers: int, merge: int, typed: set[str], leased: bool = False
) -> dict[str, int | None]:
    """Return ``batch_size`` per worker and ``global_batch_size``; typed values override a recipe's.

    If a global batch cannot be shared out evenly, ``batch_size`` is the largest share of a worker.

    Raises:
        UserError: they contradict each other, or the batch cannot be shared out.
    """
    size, together, portions = (
        None if data.batch_size == AUTO else data.batch_size,
        data.global_batch_size,
        workers * merge,
    )
    if together is None:
        return {"batch_size": 32 if size is None else size}
    if size is not None and "data.batch_size" in typed and "data.global_batch_size" not in typed:
        return {"batch_size": size, "global_batch_size": None}
    what = f"data.global_batch_size={together}"
    spread = f"{counted(workers, 'worker')}" + (f" x {merge} merged batches" if merge > 1 else "")
    if together < portions:
        raise UserError(what, f"has not one sample for each of {spread}", f"data.global_batch_size={portions}")
    if leased and together % portions:
        nearest = max(portions, round(together / portions) * portions)
        why = f"is not a multiple of {spread}, and work that is leased in blocks comes in batches of one size"
        raise UserError(what, why, f"data.global_batch_size={nearest} (or data.work=static)")
    share = -(-together // portions)
    if size is not None and size != share and ("data.batch_size" in typed) == ("data.global_batch_size" in typed):
        raise UserError(
            what,
            f"disagrees with data.batch_size={size}, which over {spread} makes {size * portions}",
            f"data.batch_size={share} (or one of the two alone)",
        )
    return {"batch_size": share}


def nearest(data: schema.DataConfig, portions: int) -> dict[str, int | None]:
    """Return valid batch sizes near the invalid ones, for the plan of a run that would be refused."""
    size = None if data.batch_size == AUTO else data.batch_size
    together = data.global_batch_size or (size or 1) * portions
    return {"batch_size": max(1, round(together / portions)), "global_batch_size": None}


def with_padding(config: RunConfig, typed: set[str], leased: bool) -> RunConfig:
    """Return the config without padding for global batches, in which each sample counts once, and with strided padding
    for leased work.

    Raises:
        UserError: it was typed; or the samples come in an order that is no sampler of Paddle's.
    """
    sampler, together = config.sampler, config.data.global_batch_size
    blocks = f"sampler.padding={sampler.padding}" if sampler.padding == CONTIGUOUS else ""
    if together is not None and sampler.pad and "sampler.pad" in typed:
        why = "with data.global_batch_size each sample is shared out once, unevenly if need be, and none is repeated"
        raise UserError(
            "sampler.pad=true", why, "sampler.pad=false (or data.batch_size in place of data.global_batch_size)"
        )
    if together is not None and blocks and "sampler.padding" in typed:
        why = "goes with data.batch_size: with data.global_batch_size updates do not depend on the number of workers"
        raise UserError(blocks, why, "sampler.padding=strided (or data.batch_size in place of data.global_batch_size)")
    if leased and blocks and "sampler.padding" in typed:
        why = "splits an epoch beforehand, and with this strategy workers lease blocks of work"
        raise UserError(blocks, why, "data.work=static (or sampler.padding=strided)")
    if blocks and not is_each_once(config):
        raise UserError(
            blocks, f"takes each sample once, and {sampler_name(config)} does not", "sampler.padding=strided"
        )
    if together is not None:
        return config.changed(sampler={"pad": False, "padding": STRIDED})
    return config.changed(sampler={"padding": STRIDED}) if leased else config


def evaluation_batch_size(data: schema.DataConfig, workers: int) -> int:
    """The batch size of a worker in mode=eval and mode=predict; any will do, as nothing is trained."""
    size = data.val_batch_size or (None if data.batch_size == AUTO else data.batch_size)
    return int(size or max(1, (data.global_batch_size or 32 * workers) // workers))


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
    """The sizes of batches from which batch norm computes a variance, for the first and last batches of an epoch: those
    of each worker, or with ``sync_batch_norm`` of all workers together."""
    from trainer.data.sampler import TrainingSampler, training_sampler, undivided_sampler

    samples, workers = checked.facts.train_samples, checked.workers
    if checked.leased:
        workers = 1
        sampler: TrainingSampler = undivided_sampler(config, samples, config.batch_size)
    else:
        sampler = training_sampler(config, samples, config.batch_size, 0, workers)
    limits = [config.limit_train_batches, config.max_steps and config.max_steps * checked.merge]
    limit = None if checked.leased else min((one for one in limits if one), default=None)
    cuts, ends = list(sampler.global_batches())[:limit], 2 * checked.merge
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
