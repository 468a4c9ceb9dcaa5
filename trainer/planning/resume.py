"""Checks whether a run can resume from a checkpoint with this config and other numbers of workers and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.keys import is_of, spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import Entry
from trainer.errors import UserError
from trainer.host import versions
from trainer.planning.batches import CONTIGUOUS
from trainer.planning.find_checkpoint import own
from trainer.planning.plan import Plan
from trainer.planning.restart_checks import EACH, GEO, STRATEGIES
from trainer.planning.resume_changes import (
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


def _batch(about: store.About, merge: int) -> int:
    """The batch size of one worker in the run that wrote the checkpoint."""
    return about.global_batch_size // (about.workers * merge)


def _check_other_workers(config: RunConfig, plan: Plan, about: store.About, folder: Path) -> None:
    """Refuse to resume with another number of workers if that does not fit the blocks leased before.

    Raises:
        UserError: it does not.
    """
    if not plan.batches.leased:
        why = f"{folder} has {counted(about.workers, 'worker')}, each with its own part of an epoch (data.work=static)"
        raise UserError(f"{plan.topology.workers} workers", why, f"launch.workers={about.workers}")
    if (before := _batch(about, plan.batches.merge)) != plan.batches.size:
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


def _counts_for_others(plan: Plan, about: store.About, key: str) -> bool:
    """Whether a resumed asynchronous run has another value of a key only because it has more or fewer workers."""
    return _other_workers(plan, about) and key in EACH and about.config.get(key) is not None


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
    """Whether the run before was to end inside the epoch in which the checkpoint is, or before that, and this one goes
    on."""
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
"""Key that is compared by what ``auto`` chose (:func:`_precision`)."""
FP16, FP64 = "fp16", "fp64"
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
"""Keys, and groups of them, that may differ: what is computed does not depend on them, or the plan tells."""
ALIKE = ("single", "collective")
"""Strategies that can take over each other's checkpoints: every worker holds the same state."""
SYNC = "pserver_sync"
"""Goes on with any number of workers and servers: servers share their parts anew, and workers have nothing of their
own."""


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run resumes, and how the run differs from it.

    Attributes:
        folder: of the checkpoint.
        about: what its checkpoint.json tells.
        here: it lies in the run's own folder, which then is not cleared.
        matters: what differs and changes the training, each a line; there is none without ``resume.allow_changes``.
        harmless: what else differs in the config, each a line.
        lost: what the checkpoint has and this run cannot take over, each a line.
        versions: which packages had another version, each a line.
    """

    folder: Path
    about: store.About
    here: bool
    matters: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The number of updates done at the checkpoint."""
        return self.about.done

    @property
    def source(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return self.folder.parent.parent


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
    else:
        _check_global_batch(plan, about, folder)
    matters, harmless = _changes(config, plan, about)
    check_ages(config, about)
    lost = (*left_behind(plan, about), *_average(config, about), *begins_anew(), *what_watches(config, plan, about))
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
    other = tuple(versions.differences(about.versions, versions.installed()))
    return Resume(folder, about, here, matters, harmless, lost, other)


def _changes(config: RunConfig, plan: Plan, about: store.About) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How a run differs from the one that wrote the checkpoint: what matters to its training, and what does not."""
    matters, harmless = list[str](), list[str]()
    for key, line in differences(about.config, public(config), plan.strategy.name != about.strategy):
        if is_of(key, HARMLESS) or _counts_for_others(plan, about, key):
            harmless.append(line)
        elif key != PRECISION:
            matters.append(line)
    if arithmetic := _precision(plan, about):
        matters.append(arithmetic)
    others = _other_workers(plan, about)  # whose updates are as many together
    if not matters and about.total_steps != plan.length.total_steps and not others:
        matters = [f"the run had {about.total_steps} updates, and has {plan.length.total_steps}"]
    matters = matters or [*_other_order(config, plan, about), *(why for of in OTHER_NUMBERS for why in of(plan, about))]
    return tuple(matters), tuple(harmless)


def with_data(resume: Resume, now: str, config: RunConfig) -> Resume:
    """Compare the data with those of the checkpoint; returns ``resume`` with the difference.

    Args:
        now: their fingerprint.

    Raises:
        UserError: they are others, and ``resume.allow_changes`` does not allow it.
    """
    before = resume.about.data
    if before == now:
        return resume
    if not config.resume.allow_changes:
        why = f"the data are others than those of {resume.folder}: their fingerprint was {before}, is {now}"
        raise UserError("resume", why, "the data of before, or resume.allow_changes=true")
    matters = (*resume.matters, f"the data: their fingerprint was {before}, is {now}")
    anew = [
        line for line in begin_anew(measures_of(config, resume.about.config, True), config) if line not in resume.lost
    ]
    return replace(resume, matters=matters, lost=(*resume.lost, *anew))


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
    return replace(resume, matters=(*resume.matters, f"{other}: the head goes on in its order"))


def other_classes(other: str, folder: Path) -> UserError:
    """The error for a run whose data have other classes than those of the checkpoint."""
    return UserError(
        "resume",
        f"{other}, and the head of {folder} goes by their order",
        "the data of before, or model=finetune model.weights=FILE for a new head",
    )


def as_begun(plan: Plan, resume: Resume | None) -> Plan:
    """Return the plan with the size of leased blocks from the run's beginning, which never changes in a run."""
    blocks = resume.about.lease_batches if resume is not None else 0
    return plan.changed(batches={"lease_batches": blocks}) if blocks else plan


def _check_global_batch(plan: Plan, about: store.About, folder: Path) -> None:
    """As many samples in an update as before.

    Raises:
        UserError: there are more or fewer.
    """
    if about.global_batch_size != plan.batches.global_size:
        why = f"an update has {plan.batches.global_size} samples, and had {about.global_batch_size} in {folder}"
        raise UserError(f"{plan.topology.workers} workers", why, f"data.global_batch_size={about.global_batch_size}")


def _other_order(config: RunConfig, plan: Plan, about: store.About) -> Iterator[str]:
    """Why the samples of an epoch would come in another order."""
    sampler = config.sampler
    before, now = (about.workers, about.config.get("sampler", {}).get("pad")), (plan.topology.workers, sampler.pad)
    if sampler.padding == CONTIGUOUS and before != now:
        yield (
            f"the run had {counted(about.workers, 'worker')} and sampler.pad={spelled(before[1])}, and "
            f"sampler.padding={CONTIGUOUS} repeats samples before it shuffles"
        )


def _check_strategy(plan: Plan, about: store.About, folder: Path) -> None:
    """This strategy can take over what the one before has left.

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
    if strategy.get("comm_hook") == "powersgd":
        return "what strategy.comm_hook=powersgd has left out would be lost"
    if about.strategy == SYNC and (strategy.get("evict_after") is not None or strategy.get("entry") != asdict(Entry())):
        return "workers that keep whole tables neither drop rows nor let them in late"
    if plan.strategy.name == SYNC and not plan.strategy.traits.exact:
        return "with these options of pserver_sync the updates would be others"
    return ""


def _precision(plan: Plan, about: store.About) -> str:
    """How the precision differs from the checkpoint's, or '' if it does not; ``auto`` counts as what it chose."""
    before, now = about.precision, plan.chosen.precision
    return f"precision was {before}, is {now}" if before != now else ""


def left_behind(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything that a resuming run loses or begins anew.

    Parameters and what the optimizer remembers are float32 with fp32, bf16 and fp16 alike, and float64 with fp64.
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
    """Yield what becomes of the moving average of the weights, if only one of the two runs has one."""
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
    for option, value in (("comm_hook", "powersgd"), ("wire", "int8")):
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


OTHER_NUMBERS = (_other_replicas, _other_errors, _other_numbers)
"""Each tells why updates are others where there are more or fewer workers or servers than before."""
