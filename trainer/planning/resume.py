"""Checks whether a run can resume from a checkpoint with this config and other numbers of workers and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.keys import is_of, spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import Entry
from trainer.errors import UserError
from trainer.host import versions
from trainer.planning.batches import CONTIGUOUS
from trainer.planning.find_checkpoint import own
from trainer.planning.plan import GEO, Plan, Resume
from trainer.planning.restart_checks import EACH, STRATEGIES
from trainer.planning.resume_changes import (
    HARMLESS,
    MEMORIES,
    begin_anew,
    check_ages,
    completed,
    differences,
    measures_of,
    public,
    what_watches,
)
from trainer.planning.task_checks import check_checkpoint
from trainer.wording import counted


def _other_workers(plan: Plan, about: store.About) -> bool:
    """Whether an asynchronous run resumes with another number of workers."""
    return plan.strategy.name in STRATEGIES and about.workers != plan.topology.workers


def _other_processes(plan: Plan, about: store.About) -> bool:
    """Whether an asynchronous run resumes with another number of workers or servers."""
    servers = plan.topology.roles.get("server", 0)
    return plan.strategy.name in STRATEGIES and (about.workers, about.servers) != (plan.topology.workers, servers)


def _check_other_workers(config: RunConfig, plan: Plan, about: store.About, folder: Path) -> None:
    """Refuse another number of workers if it does not fit the blocks leased before.

    Raises:
        UserError: it does not.
    """
    if not plan.batches.leased:
        why = f"{folder} has {counted(about.workers, 'worker')}, each with its own part of an epoch (data.work=static)"
        raise UserError(f"{plan.topology.workers} workers", why, f"launch.workers={about.workers}")
    if (before := about.global_batch_size // (about.workers * plan.batches.merge)) != plan.batches.size:
        why = (
            f"a batch has {plan.batches.size} samples, and had {before} in {folder}; work is handed out in blocks "
            f"of batches"
        )
        raise UserError(f"{plan.topology.workers} workers", why, f"data.batch_size={before}")
    for key in EACH:
        before_each, now = about.config.get(key), getattr(config, key)
        if before_each is not None and before_each * about.workers != (now or 0) * plan.topology.workers:
            together = before_each * about.workers
            why = (
                f"it counts those of each worker, and {folder} is of {counted(about.workers, 'worker')} with "
                f"{before_each} each"
            )
            even = (
                f"{key}={together // plan.topology.workers}"
                if together % plan.topology.workers == 0
                else f"launch.workers={about.workers}"
            )
            raise UserError(f"{key}={now}", why, even)


def _lost_with_other_numbers(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything that begins anew with another number of workers or servers."""
    if about.workers == plan.topology.workers and 0 < about.lease_batches != plan.batches.lease_batches:
        yield f"blocks of {plan.batches.lease_batches} batches: those of the run stay at {about.lease_batches}"
    if plan.batches.leased and about.config.get("max_steps") and _is_cut(plan, about):
        yield (
            f"the rest of the epoch that max_steps={about.config.get('max_steps')} has cut: its blocks were "
            f"counted then, and the next epoch follows"
        )
    if not _other_processes(plan, about):
        return
    if plan.strategy.name == GEO:
        yield (
            "what tells the replicas of workers apart: all begin with the servers' parameters, and train again on "
            "what they had not exchanged"
        )
        yield "what the workers' optimizers remember of rows"
    if float(about.config.get("strategy", {}).get("delay_compensation") or 0.0):
        yield "the parameters that workers had pulled: a gradient of the first update is not compensated"


def _is_cut(plan: Plan, about: store.About) -> bool:
    """Whether max_steps of the run before cut the checkpoint's epoch, or an earlier one, and this run goes on."""
    whole, rest = divmod(about.total_steps, plan.length.steps_per_epoch)
    return plan.length.total_steps > about.total_steps and bool(rest) and about.epoch >= whole


def _other_numbers(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if pserver_geo's workers or servers are now more or fewer."""
    if plan.strategy.name == GEO and _other_processes(plan, about):
        now = plan.topology.roles.get("server", 0)
        yield (
            f"the run had {counted(about.workers, 'worker')} and {counted(about.servers, 'server')}, and has "
            f"{plan.topology.workers} and {now}; each worker has a replica of its own"
        )


PRECISION = "precision"
"""Key that is compared by what ``auto`` chose."""
FP16, FP64 = "fp16", "fp64"
ALIKE = ("single", "collective", "sharded")
"""Strategies that can take over each other's checkpoints: every worker holds the same state."""
SYNC = "pserver_sync"
"""Resumes with any number of workers and servers: servers divide the parameters anew, and workers keep no state."""


def fit(config: RunConfig, plan: Plan, folder: Path, begins_anew: Callable[[], Sequence[str]] = tuple) -> Resume:
    """Check that a run can resume from a checkpoint with this config; returns the :class:`Resume`.

    Args:
        begins_anew: what of the optimizer's state is not carried over; asked once the strategy fits.

    Raises:
        UserError: the run cannot go on from it as it is configured.
    """
    about, own_path = store.about(folder), own(folder, Path(plan.paths.run_dir))
    about = replace(about, config=completed(about.config, public(config)))
    here, folder = own_path is not None, own_path or folder
    check_checkpoint(config, about.config, folder)
    _check_strategy(plan, about, folder)
    if (about.servers or plan.topology.roles.get("server")) and (why := _kept_in_servers(plan, about)):
        raise UserError(f"precision={plan.chosen.precision}", f"{folder} {why}", f"precision={about.precision}")
    if _other_workers(plan, about):
        _check_other_workers(config, plan, about, folder)
    elif about.global_batch_size != plan.batches.global_size:
        why = f"an update has {plan.batches.global_size} samples, and had {about.global_batch_size} in {folder}"
        raise UserError(f"{plan.topology.workers} workers", why, f"data.global_batch_size={about.global_batch_size}")
    matters, harmless = _changes(config, plan, about)
    check_ages(config, about)
    lost = [*left_behind(plan, about), *_average(config, about), *begins_anew(), *what_watches(config, plan, about)]
    if matters and not config.resume.allow_changes:
        without = f" (not carried over: {'; '.join(lost)})" if lost else ""
        besides = f"; harmless differences: {'; '.join(harmless)}" if harmless else ""
        why = f"the config differs from that of {folder} in what matters: {'; '.join(matters)}{without}{besides}"
        raise UserError("resume", why, "the values of before, or resume.allow_changes=true")
    if plan.strategy.traits.lockstep and plan.length.total_steps < about.step:
        long_enough = f"epochs={about.step // max(1, plan.length.steps_per_epoch) + 1}"
        if config.max_steps:
            long_enough = f"max_steps={max(about.total_steps, about.step + 1)}"
        raise UserError(
            counted(plan.length.total_steps, "update"), f"{folder} is after update {about.step}", long_enough
        )
    other = list(versions.differences(about.versions, versions.installed()))
    return Resume(str(folder), here, about.done, matters, harmless, lost, other)


def _changes(config: RunConfig, plan: Plan, about: store.About) -> tuple[list[str], list[str]]:
    """How a run differs from the one that wrote the checkpoint: what matters to its training, and what does not."""
    matters, harmless, others = list[str](), list[str](), _other_workers(plan, about)
    for key, line in differences(about.config, public(config), plan.strategy.name != about.strategy):
        of_each = others and key in EACH and about.config.get(key) is not None  # together they do as many updates
        if is_of(key, HARMLESS) or of_each:
            harmless.append(line)
        elif key != PRECISION:
            matters.append(line)
    if about.precision != plan.chosen.precision:
        matters.append(f"precision was {about.precision}, is {plan.chosen.precision}")
    if not matters and about.total_steps != plan.length.total_steps and not others:
        matters = [f"the run had {about.total_steps} updates, and has {plan.length.total_steps}"]
    if not matters:
        matters = [*_other_order(config, plan, about), *_other_replicas(plan, about), *_other_errors(plan, about)]
        matters += _other_numbers(plan, about)
    return matters, harmless


def with_data(resume: Resume, now: str, config: RunConfig) -> Resume:
    """Compare the data with those of the checkpoint; returns ``resume`` with the difference.

    Args:
        now: their fingerprint.

    Raises:
        UserError: they are others, and ``resume.allow_changes`` does not allow it.
    """
    about = store.about(Path(resume.folder))
    before = about.data
    if before == now:
        return resume
    if not config.resume.allow_changes:
        why = f"the data are others than those of {resume.folder}: their fingerprint was {before}, is {now}"
        raise UserError("resume", why, "the data of before, or resume.allow_changes=true")
    measures = measures_of(config, completed(about.config, public(config)), True)
    return replace(
        resume,
        matters=[*resume.matters, f"the data: their fingerprint was {before}, is {now}"],
        lost=[*dict.fromkeys((*resume.lost, *begin_anew(measures, config)))],
    )


def with_classes(resume: Resume, other: str, allowed: bool) -> Resume:
    """Compare the classes with those of the checkpoint; returns ``resume`` with the difference.

    Args:
        other: how they differ, in words; empty: they do not.

    Raises:
        UserError: they do, and ``resume.allow_changes`` does not allow it.
    """
    if not other:
        return resume
    if not allowed:
        raise other_classes(other, resume.folder)
    return replace(resume, matters=[*resume.matters, f"{other}: the head goes on in its order"])


def other_classes(other: str, folder: str) -> UserError:
    """The error for a run whose data have other classes than those of the checkpoint."""
    return UserError(
        "resume",
        f"{other}, and the head of {folder} goes by their order",
        "the data of before, or model=finetune model.weights=FILE for a new head",
    )


def _other_order(config: RunConfig, plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why the samples of an epoch would come in another order."""
    sampler = config.sampler
    before, now = (about.workers, about.config.get("sampler", {}).get("pad")), (plan.topology.workers, sampler.pad)
    if sampler.padding == CONTIGUOUS and before != now:
        yield (
            f"the run had {counted(about.workers, 'worker')} and sampler.pad={spelled(before[1])}, and "
            f"sampler.padding={CONTIGUOUS} repeats samples before it shuffles"
        )


def _check_strategy(plan: Plan, about: store.About, folder: Path) -> None:
    """Refuse a strategy that cannot load the state of the one before.

    Raises:
        UserError: it cannot.
    """
    before, now = about.strategy, plan.strategy.name
    if before != now and {before, now} <= {*ALIKE, SYNC}:
        if SYNC in (before, now) and (kept := _kept_at_one_place(plan, about)):
            raise UserError(f"strategy={now}", f"{folder} is of strategy={before}, and {kept}", f"strategy={before}")
        return
    if before != now:
        raise UserError(f"strategy={now}", f"{folder} is of strategy={before}", f"strategy={before}")
    if now in (*ALIKE, SYNC, *STRATEGIES):
        return
    if about.workers != plan.topology.workers and not plan.strategy.traits.replicas:
        why = f"{folder} has {about.workers} workers, each with a state of its own"
        raise UserError(f"{plan.topology.workers} workers", why, f"launch.workers={about.workers}")
    if about.servers != (servers := plan.topology.roles.get("server", 0)):
        why = f"{folder} has {about.servers} servers, each with its own count of the work that is done"
        raise UserError(f"launch.servers={servers}", why, f"launch.servers={about.servers}")


def _kept_at_one_place(plan: Plan, about: store.About) -> str:
    """What workers and servers cannot hand over to each other; empty: nothing."""
    strategy = completed(about.config.get("strategy", {}), {"entry": asdict(Entry())}, "strategy.")
    if about.strategy == SYNC and (wire := strategy.get("wire", "full")) != "full":
        return f"what strategy.wire={wire} has rounded off would be lost"
    if (hook := strategy.get("comm_hook")) in ("powersgd", "dgc"):
        return f"what strategy.comm_hook={hook} has left out would be lost"
    if about.strategy == SYNC and (strategy.get("evict_after") is not None or strategy.get("entry") != asdict(Entry())):
        return "workers that keep whole tables neither drop rows nor let them in late"
    if plan.strategy.name == SYNC and not plan.strategy.traits.exact:
        return "with these options of pserver_sync the updates would be others"
    return ""


def left_behind(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for each thing that a resuming run loses or begins anew.

    Parameters and optimizer state are float32 with fp32, bf16 and fp16, and float64 with fp64.
    """
    before, now = about.precision, plan.chosen.precision
    if now == FP16 != before:
        yield "precision=fp16 needs a loss scale, and the checkpoint has none: it begins anew, at 65536"
    if before == FP16 != now:
        yield f"the loss scale of precision=fp16, which precision={now} does not need"
    if before == FP64 != now:
        yield "what float64 has more than float32: parameters and what the optimizer remembers are rounded"
    for _ in _other_replicas(plan, about):
        mean = "the mean of their parameters and of what their optimizers remember"
        yield f"what tells the replicas of {counted(about.workers, 'worker')} apart: all begin with {mean}"
    for _ in _other_errors(plan, about):
        yield "what workers have left out of their gradients: it is not added to a later update"
    yield from _lost_with_other_numbers(plan, about)


def _average(config: RunConfig, about: store.About) -> Iterator[str]:
    """Yield what becomes of the averaged weights if only one of the two runs has them."""
    before, now = about.config.get("ema", {}).get("decay"), config.ema.decay
    if before is None and now is not None:
        yield (
            f"ema.decay={now} needs an average of the weights, and the checkpoint has none: it begins with the "
            f"weights of update {about.step}"
        )
    if before is not None and now is None:
        yield "the moving average of the weights, which ema.decay=null does not need"


def _other_replicas(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if workers with own replicas are now more or fewer."""
    if plan.strategy.traits.replicas and about.workers != plan.topology.workers:
        yield (
            f"the run had {counted(about.workers, 'worker')}, each with a replica of its own, and has "
            f"{plan.topology.workers}"
        )


def _other_errors(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if workers with compression errors are now more or fewer."""
    strategy = about.config.get("strategy", {})
    for option, value in MEMORIES:
        if strategy.get(option) == value and about.workers != plan.topology.workers:
            yield (
                f"the run had {counted(about.workers, 'worker')}, each with what strategy.{option}={value} has "
                f"left out, and has {plan.topology.workers}"
            )


def _kept_in_servers(plan: Plan, about: store.About) -> str:
    """Return why parameter servers cannot take over the checkpoint's values (float32 or float64), or ''."""
    kinds = [64 if which == FP64 else 32 for which in (about.precision, plan.chosen.precision)]
    return (
        "" if kinds[0] == kinds[1] else f"is of precision={about.precision}, and servers keep float{kinds[0]} as it is"
    )
