"""Checks a user's streams: how long an epoch is, who reads what, and what is impossible without sample numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import is_each_once, sampler_name
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.wording import counted

SHARES = {
    "samples": "every worker reads it and takes its samples in turn",
    "files": "every worker reads its own files",
    "none": "every worker trains on all of it",
}
"""What a worker takes of a stream, by data.shard."""


def with_length(
    config: RunConfig, facts: Facts, together: int, workers: int, typed: set[str], searches: bool = False
) -> tuple[RunConfig, Facts]:
    """Return the config and facts of a run on a stream with an epoch of known length; for other data, unchanged.

    Args:
        together: samples of an update over all workers; searches: that is a guess.

    Raises:
        UserError: the stream's length is not known, something is asked for that needs numbers of samples, or a key of
            streams is set for other data.
    """
    data, source = config.data, facts.source
    if not facts.iterable:
        for key, default in (("shard", schema.DataConfig.shard), ("steps_per_epoch", None), ("shuffle_buffer", None)):
            if (given := getattr(data, key)) != default:
                instead = f"data.{key}={'null' if default is None else default}" + (
                    f" limit_train_batches={given}" if key == "steps_per_epoch" else ""
                )
                raise UserError(f"data.{key}={given}", f"is for streams, and {source} has numbered samples", instead)
        return config, facts
    if config.mode != "train":
        return config, facts
    if searches:
        raise UserError(
            "data.batch_size=auto",
            f"{source} is a stream, which the search would read again and again",
            "data.batch_size=32",
        )
    for refusal in _refused(config, facts, together, workers, typed):
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


def _refused(config: RunConfig, facts: Facts, together: int, workers: int, typed: set[str]) -> Iterator[UserError]:
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


def how(config: RunConfig, facts: Facts) -> str:
    """Describe for the plan how a stream is read; '' for other data."""
    if not facts.iterable or config.mode != "train":
        return ""
    order = (
        "in its own order"
        if config.data.shuffle_buffer is None
        else f"drawn from a buffer of {counted(config.data.shuffle_buffer, 'sample')}"
    )
    return f"{order}, from its beginning in each epoch; {SHARES[config.data.shard]} (data.shard={config.data.shard})"
