"""Rows of the plan table about checkpoints: from which one a run resumes, and which ones it will write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.config.schema import CheckpointConfig
from trainer.errors import why
from trainer.host import disk_speed
from trainer.host.folder_checks import nearest
from trainer.job.memory_rows import memory_row, saved_slots
from trainer.job.ready import Ready
from trainer.planning.plan import GEO, Resume
from trainer.wording import sized

BESIDES = 20_000
"""Further bytes of a worker's part: random generators, progress, its share of checkpoint.json."""

NOT_FINITE = {
    "skip": "updates are left out (on_nonfinite=skip)",
    "rewind": "the run goes back to its last checkpoint, at most {most} times (on_nonfinite=rewind)",
}


def kept_rows(ready: Ready) -> Iterator[tuple[str, str]]:
    """Yield rows of the plan table about checkpoints: how often, what size, where; and about memory. None if nothing is
    trained."""
    plan, config = ready.plan, ready.checked.config.checkpoint
    if plan.mode != "train":
        return
    yield from memory_row(ready)
    if plan.resume is not None:
        yield from _resumes(plan.resume)
    rhythm = ", ".join(_rhythm(config))
    rhythm = " and ".join(rhythm.rsplit(", ", 1))
    if not rhythm:
        yield "checkpoints", "none: the run cannot be resumed"
    else:
        how, size = _size(ready)
        yield "checkpoints", f"{rhythm}, {how}{sized(size)} each, {_stay(config)}"
        if not ready.checked.elsewhere:
            yield "  written in", _takes(ready, size)
            yield from _lacks_room(ready, size)
        if config.to is not None:
            from trainer.checkpoint.remote import address_of

            yield "  copied to", address_of(config.to, Path(plan.paths.run_dir), plan.paths.whole_path)
    if (said := NOT_FINITE.get(ready.checked.config.on_nonfinite)) is not None:
        yield "not finite", said.format(most=ready.checked.config.max_rewinds)


def _resumes(resume: Resume) -> Iterator[tuple[str, str]]:
    about = store.about(Path(resume.folder))
    place = f"checkpoints/{Path(resume.folder).name}" if resume.here else resume.folder
    yield (
        "resumes",
        f"{place} after update {about.done} of {about.total_steps} (epoch {about.epoch}, update {about.update})",
    )
    for change in resume.matters:
        yield "  changed, matters", change
    for change in resume.harmless:
        yield "  changed, harmless", change
    if resume.versions:
        yield "  other versions", f"{'; '.join(resume.versions)}: numbers may differ"
    for what in resume.lost:
        yield "  not carried over", what


def _rhythm(config: CheckpointConfig) -> Iterator[str]:
    if config.every_steps is not None:
        yield "every update" if config.every_steps == 1 else f"every {config.every_steps} updates"
    if config.every_epochs is not None:
        yield "every epoch" if config.every_epochs == 1 else f"every {config.every_epochs} epochs"
    if config.every_minutes is not None:
        yield f"every {config.every_minutes:g} min"


def _stay(config: CheckpointConfig) -> str:
    newest = "the newest" if config.keep_last == 1 else f"the {config.keep_last} newest"
    best = f" and the {config.keep_best} best" if config.keep_best else ""
    return f"{newest}{best} {'stay' if config.keep_last + config.keep_best > 1 else 'stays'}"


def _size(ready: Ready) -> tuple[str, float]:
    """The size of a checkpoint: ``about`` or ``at most`` if it is estimated, and the bytes. The best weights are a
    link."""
    if ready.plan.resume is not None:
        files = durable_folder.files(Path(ready.plan.resume.folder), store.FORMAT).items()
        return "", sum(seal.get("bytes", 0) for name, seal in files if name != store.BEST)
    config, plan, model = ready.checked.config, ready.plan, ready.model
    whole = model.parameters
    averaged = whole if config.ema.decay is not None else 0
    state = saved_slots(config.node("optimizer")) * model.trained
    holders = 1 if plan.strategy.traits.same_everywhere else plan.topology.workers
    at_servers = plan.strategy.traits.tables_at_servers
    if plan.strategy.name == GEO:  # a replica, what the servers had at the last exchange, and the optimizer
        numbers = whole + (2 * whole + state) * holders
    elif at_servers:
        numbers = whole + state + (whole - model.in_tables + averaged) * holders
    else:
        numbers = (whole + state + averaged) * holders
    how = "at most " if at_servers and model.in_tables else "about "  # rows that nobody has asked for are left out
    return how, numbers * (8 if plan.chosen.precision == "fp64" else 4) + BESIDES * plan.topology.workers


def _takes(ready: Ready, size: float) -> str:
    """The time to write a checkpoint at the current speed of the disk, in words."""
    try:
        rate = disk_speed.rate(Path(ready.plan.paths.run_dir), int(size))
    except OSError as error:
        return f"an unknown time: {why(error)}"
    seconds = size / rate
    took = (
        "less than 1 s"
        if seconds < 1
        else f"about {seconds:.0f} s"
        if seconds < 99
        else f"about {seconds / 60:.0f} min"
    )
    waits = "behind the training" if ready.checked.config.checkpoint.background else "while the training waits"
    return f"{took} {waits}, at {sized(rate)} a second (measured now)"


def _lacks_room(ready: Ready, size: float) -> Iterator[tuple[str, str]]:
    """Yield a row if the disk has too little room for the kept checkpoints and a new one."""
    config = ready.checked.config.checkpoint
    needed = (config.keep_last + config.keep_best + 1) * size
    free = shutil.disk_usage(nearest(Path(ready.plan.paths.run_dir))).free
    if free < needed:
        yield (
            "  too little room",
            (
                f"{sized(free)} are free, {sized(needed)} are needed: a checkpoint that the disk does not take is "
                f"left out, and the training goes on"
            ),
        )
