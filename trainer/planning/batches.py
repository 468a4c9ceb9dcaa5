"""How many samples an update has (``data.batch_size``, ``data.global_batch_size``), and whether the data suffice."""

from __future__ import annotations

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import is_each_once, sampler_name
from trainer.errors import UserError
from trainer.host import torchrun
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
    mine, together = "data.batch_size" in typed, "data.global_batch_size" in typed
    if data.global_batch_size is not None and together and not mine:
        return False
    if data.global_batch_size is not None and mine == together:
        why = f"finds the samples of an update, and data.global_batch_size={data.global_batch_size} sets them"
        raise UserError(what, why, "data.global_batch_size=null (or data.batch_size=null)")
    if launch.nnodes > 1:
        why = (
            "is searched for on one host, and the run has several: search with launch.nnodes=1, and give all "
            "hosts what is found"
        )
        raise UserError(what, why, f"data.batch_size={FIRST_TRY}")
    if torchrun.is_rank():
        why = "starts processes for each try, and torchrun has started the run's already"
        raise UserError(what, why, "python -m trainer ... launch.nproc=N without torchrun")
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
    """The ``batch_size`` per worker and ``global_batch_size`` that the config means; typed values go before a recipe's.

    A global batch is shared out unevenly where it must be, and the first is the most that a worker gets at a time.

    Raises:
        UserError: they contradict each other, or the batch cannot be shared out.
    """
    mine, together, portions = (
        None if data.batch_size == AUTO else data.batch_size,
        data.global_batch_size,
        workers * merge,
    )
    if together is None:
        return {"batch_size": 32 if mine is None else mine}
    if mine is not None and "data.batch_size" in typed and "data.global_batch_size" not in typed:
        return {"batch_size": mine, "global_batch_size": None}
    what = f"data.global_batch_size={together}"
    spread = f"{counted(workers, 'worker')}" + (f" x {merge} merged batches" if merge > 1 else "")
    if together < portions:
        raise UserError(what, f"has not one sample for each of {spread}", f"data.global_batch_size={portions}")
    if leased and together % portions:
        nearest = max(portions, round(together / portions) * portions)
        why = f"is not a multiple of {spread}, and work that is leased in blocks comes in batches of one size"
        raise UserError(what, why, f"data.global_batch_size={nearest} (or data.work=static)")
    share = -(-together // portions)
    if mine is not None and mine != share and ("data.batch_size" in typed) == ("data.global_batch_size" in typed):
        raise UserError(
            what,
            f"disagrees with data.batch_size={mine}, which over {spread} makes {mine * portions}",
            f"data.batch_size={share} (or one of the two alone)",
        )
    return {"batch_size": share}


def nearest(data: schema.DataConfig, portions: int) -> dict[str, int | None]:
    """Valid batch sizes near the invalid ones asked for, to show a plan that a run would be refused for."""
    mine = None if data.batch_size == AUTO else data.batch_size
    together = data.global_batch_size or (mine or 1) * portions
    return {"batch_size": max(1, round(together / portions)), "global_batch_size": None}


def with_padding(config: RunConfig, typed: set[str], leased: bool) -> RunConfig:
    """Return the config without padding where samples count once (global batches), and strided where work is leased.

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
