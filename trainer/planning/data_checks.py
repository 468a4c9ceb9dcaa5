"""Checks that the data can do what the config asks for; of streams also how long an epoch is, and what workers read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config import keys, schema
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import epoch_order, is_each_once, sampler_name
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.planning.batches import STRIDED
from trainer.planning.checked_config import Checked
from trainer.planning.user_class_checks import refusals
from trainer.wording import counted


def with_classes(config: RunConfig, facts: Facts) -> RunConfig:
    """Return the config with the data's number of classes, unless the config sets one."""
    found = {"num_classes": facts.classes}
    if config.data.num_classes is None:
        config = config.changed(data=found)
    return config.changed(model=found) if config.model.get("num_classes", 0) is None else config


def check_orders(checked: Checked) -> None:
    """Refuse an order of samples, or mixing of batches, that is impossible with these data."""
    _check_order(checked.config, checked.facts)
    _check_mixing(checked.config)


def check_data(checked: Checked) -> None:
    """Refuse a config with another number of classes than the data, or that asks for what is impossible with them."""
    config, facts = checked.config, checked.facts
    if config.data.num_classes != facts.classes:
        raise UserError(
            f"data.num_classes={config.data.num_classes}",
            f"{facts.source} has {facts.targets}",
            f"data.num_classes={facts.classes}",
        )
    inputs = facts.shape if isinstance(facts.shape, dict) else ()
    what, declaration = f"strategy._target_={config.strategy._target_}", checked.declaration
    for refusal in refusals(what, "refuse_inputs", lambda: declaration.refuse_inputs(inputs, facts.source)):
        raise refusal
    if facts.streams and not checked.declaration.traits.leases:
        raise UserError(
            "data.cache=false",
            f"strategy={checked.declaration.name} reads samples by number, from the cache",
            "data.cache=true",
        )
    counted_later = facts.iterable or "val" in facts.estimated
    if config.mode == "train" and config.validation and not facts.val_samples and not counted_later:
        raise UserError(f"data ({facts.source})", "there are no validation samples", "validation=false")
    ids, rows = config.node("data").get("hash_size", 0), config.model.get("table_size")
    if rows is not None and (ids is None or ids > rows):
        raise UserError(
            f"model.table_size={rows}",
            f"the ids of {facts.source} go up to {ids or '2^63'} (data.hash_size)",
            f"model.table_size={keys.spelled(ids)}",
        )


def check_enough(checked: Checked) -> None:
    """Refuse more workers than there are training samples."""
    config, facts, workers = checked.config, checked.facts, checked.workers
    if config.mode != "train":
        return
    if facts.train_samples < workers:
        raise UserError(
            f"{workers} workers",
            f"{facts.source} has {facts.train_samples} training samples, fewer than workers",
            _fewer(checked),
        )
    if (positions := len(epoch_order(config, facts.train_samples))) < workers:
        raise UserError(
            f"{workers} workers", f"{sampler_name(config)} has {positions} samples in an epoch, fewer than workers"
        )


def _fewer(checked: Checked) -> str:
    """What to type if there are fewer training samples than workers: a smaller ``launch.nproc``."""
    config, samples = checked.config, max(1, checked.facts.train_samples)
    if config.sampler.drop_last and config.data.global_batch_size is None:
        samples = max(1, samples // config.batch_size)
    nodes, nproc = config.launch.nnodes, samples // config.launch.nnodes
    if not nproc:
        nodes, nproc = max(1, samples // checked.nproc), min(checked.nproc, samples)
    each = f"launch.nproc={nproc}" if config.launch.workers is None else f"launch.workers={nodes * nproc}"
    return (f"launch.nnodes={nodes} " if nodes != config.launch.nnodes else "") + each


def _check_order(config: RunConfig, facts: Facts) -> None:
    """Refuse a sampler that repeats samples without shuffling, or without knowing which samples there are."""
    if is_each_once(config):
        return
    if not config.sampler.shuffle:
        raise UserError(
            "sampler.shuffle=false", f"{sampler_name(config)} orders the samples by itself", "sampler.shuffle=true"
        )
    if facts.streams or facts.kind == "random":
        raise UserError(
            sampler_name(config),
            f"{facts.source} have no samples to choose from by their class or number",
            "sampler=each_once",
        )


def _check_mixing(config: RunConfig) -> None:
    """Refuse mixup and CutMix for a loss that does not take shares of classes."""
    data, loss = config.node("data"), config.loss
    takes_none = {
        schema.BinaryCrossEntropyLoss._target_: "loss=binary_cross_entropy",
        schema.LogLoss._target_: "loss=log_loss",
        schema.SquaredErrorLoss._target_: "loss.target=class_number" if loss.get("target") == "class_number" else "",
    }.get(str(loss["_target_"]))
    for key in ("mixup", "cutmix"):
        if data.get(key) and takes_none:
            raise UserError(
                f"data.{key}={data[key]}",
                f"makes labels that are shares of classes, which {takes_none} does not take",
                "loss=cross_entropy",
            )
        ignored = loss.get("ignore_index", -1)
        if data.get(key) and isinstance(ignored, int) and ignored >= 0:
            why = f"makes labels that are shares of classes, of which loss.ignore_index={ignored} cannot leave one out"
            raise UserError(f"data.{key}={data[key]}", why, f"data.{key}=0")


def check_unsharded(config: RunConfig, leased: bool) -> None:
    """Refuse ``sampler.shard=false`` together with settings that share an epoch's samples out to workers."""
    if config.sampler.shard or config.mode != "train":
        return
    together, others = config.data.global_batch_size, "sampler.shard=true"
    if together is not None:
        raise UserError(
            "sampler.shard=false",
            f"each worker reads every sample, and data.global_batch_size={together} shares samples out",
            f"data.global_batch_size=null (or {others})",
        )
    if leased:
        raise UserError(
            "sampler.shard=false",
            "each worker reads every sample, and with this strategy workers lease blocks of an epoch",
            f"data.work=static (or {others})",
        )
    if config.data.read == "scatter":
        raise UserError(
            "sampler.shard=false",
            "each worker reads every sample, and with data.read=scatter the first reads for all",
            f"data.read=each (or {others})",
        )
    for found, usual in (
        (f"sampler.padding={config.sampler.padding}", f"sampler.padding={STRIDED}"),
        (sampler_name(config), "sampler=each_once"),
    ):
        if found != usual:
            raise UserError(
                "sampler.shard=false",
                f"each worker reads every sample once, and {found} does otherwise",
                f"{usual} (or {others})",
            )


def check_batch_fits(config: RunConfig, samples: int, workers: int) -> None:
    """Refuse a global batch larger than the training data, unless only a plan is asked for."""
    size, together = config.batch_size, config.data.global_batch_size
    if not config.sampler.drop_last or (together or size * workers) <= samples:
        return
    if samples < workers:
        return  # refused elsewhere; no batch size helps
    left_out = f"does not fit the {samples} training samples, and sampler.drop_last leaves out what is not full"
    if together is not None:
        raise UserError(
            f"data.global_batch_size={together}",
            left_out,
            f"data.global_batch_size={samples} (or sampler.drop_last=false)",
        )
    why = f"with {counted(workers, 'worker')} a batch of {size * workers} {left_out}"
    raise UserError(
        f"data.batch_size={size}", why, f"data.batch_size={samples // workers} (or sampler.drop_last=false)"
    )


SHARES = {
    "samples": "every worker reads it and takes its samples in turn",
    "files": "every worker reads its own files",
    "none": "every worker trains on all of it",
}
"""What a worker takes of a stream, by data.shard."""


def with_length(
    config: RunConfig, facts: Facts, together: int, workers: int, typed: set[str], searches: bool = False
) -> tuple[RunConfig, Facts]:
    """Return config and facts with the length of an epoch, for a run on a stream; for other data, unchanged.

    Args:
        together: samples of an update over all workers; searches: that is a guess.

    Raises:
        UserError: the stream's length is not known, something is asked for that needs numbers of samples, or a key of
            streams is set for other data.
    """
    data, source = config.data, facts.source
    if not facts.iterable:
        for key, default in (("shard", schema.DataConfig.shard), ("steps_per_epoch", None), ("shuffle_buffer", None)):
            if (value := getattr(data, key)) != default:
                instead = f"data.{key}={'null' if default is None else default}" + (
                    f" limit_train_batches={value}" if key == "steps_per_epoch" else ""
                )
                raise UserError(f"data.{key}={value}", f"is for streams, and {source} has numbered samples", instead)
        return config, facts
    if config.mode != "train":
        return config, facts
    if searches:
        raise UserError(
            "data.batch_size=auto",
            f"{source} is a stream, which the search would read again and again",
            "data.batch_size=32",
        )
    for refusal in _stream_refusals(config, facts, together, workers, typed):
        raise refusal
    steps = data.steps_per_epoch or facts.train_samples // together
    if not steps:
        raise UserError(
            "data.steps_per_epoch=null",
            f"{source} is a stream of unknown length: an epoch is as many updates as you say",
            "data.steps_per_epoch=100",
        )
    config = config.changed(data={"work": "static"}, sampler={"shuffle": False})
    return config, replace(facts, train_samples=steps * together)


def _stream_refusals(
    config: RunConfig, facts: Facts, together: int, workers: int, typed: set[str]
) -> Iterator[UserError]:
    data, source = config.data, facts.source
    if data.work == "leased":
        yield UserError(
            "data.work=leased", f"leases blocks of numbered samples, and {source} is a stream", "data.work=static"
        )
    if data.read == "scatter":
        yield UserError("data.read=scatter", f"hands out numbered samples, and {source} is a stream", "data.read=each")
    if "sampler.shuffle" in typed and config.sampler.shuffle:
        yield UserError(
            "sampler.shuffle=true",
            f"{source} is a stream, and comes in its own order",
            "data.shuffle_buffer=1000 (or sampler.shuffle=false)",
        )
    if not is_each_once(config):
        yield UserError(
            sampler_name(config), f"{source} is a stream, which has no samples to choose from", "sampler=each_once"
        )
    if not config.sampler.shard:
        yield UserError(
            "sampler.shard=false",
            f"is for numbered samples, and {source} is a stream",
            "sampler.shard=true data.shard=none",
        )
    if config.sampler.padding != schema.SamplerConfig.padding:
        yield UserError(
            f"sampler.padding={config.sampler.padding}",
            f"splits samples by number, and {source} is a stream",
            f"sampler.padding={schema.SamplerConfig.padding}",
        )
    if data.shard != "samples" and together % workers:
        yield UserError(
            f"data.global_batch_size={together}",
            f"with data.shard={data.shard} each of {counted(workers, 'worker')} reads as many samples",
            f"data.global_batch_size={-(-together // workers) * workers}",
        )


def stream_reading(config: RunConfig, facts: Facts) -> str:
    """Describe for the plan how a stream is read; '' for other data."""
    if not facts.iterable or config.mode != "train":
        return ""
    order = (
        "in its own order"
        if config.data.shuffle_buffer is None
        else f"drawn from a buffer of {counted(config.data.shuffle_buffer, 'sample')}"
    )
    return f"{order}, from its beginning in each epoch; {SHARES[config.data.shard]} (data.shard={config.data.shard})"
