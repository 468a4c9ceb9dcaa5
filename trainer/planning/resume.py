"""Finds the checkpoint from which a run resumes, and checks whether it can with this config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import store
from trainer.config.keys import is_of, leaves, spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import Entry
from trainer.errors import UserError
from trainer.host import versions
from trainer.planning import async_resume
from trainer.planning.async_resume import lost
from trainer.planning.batches import CONTIGUOUS
from trainer.planning.changed_states import check_ages, what_watches
from trainer.planning.config_before import completed, public
from trainer.planning.kept_runs import AUTO, FRESH, RUN_DIR, check_name, check_nothing_lost, own
from trainer.planning.measured_before import begin_anew, measures_of
from trainer.planning.plan import Plan
from trainer.run_folder import lives
from trainer.terminal.status import read_status
from trainer.wording import counted

RUN_ID = re.compile(r"[0-9a-f]{32}")
"""An MLflow run's id."""
PRECISION = "precision"
"""What it stands for is compared (:func:`_precision`), not the word."""
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
    "execution.keep_memory",
    "execution.threads",
    "execution.log_every",
    "execution.log_workers",
    "execution.line_of",
    "execution.profile_after",
    "execution.profile_steps",
)
"""Keys, and groups of them, that may differ: what is computed does not depend on them, or the plan tells."""
OF_THE_COMMAND = ("resume", "plan")
"""From where a run resumes, and whether its plan alone is shown: no differences of the training."""
YES_OR_NO = ("true", "false", "yes", "no", "1", "0")
ALIKE = ("single", "collective")
"""Strategies that can take over each other's checkpoints: every worker holds the same state."""
CLIPS = ("strategy.clip_norm", "strategy.clip_value")
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


def can_go_on(config: RunConfig, plan: Plan) -> bool:
    """Whether nothing is lost if the run ends now and the same command begins it again.

    So it is where nothing is trained, before the first update of a run, and where host 0 writes checkpoints into a
    folder that this host sees.
    """
    if config.mode != "train":
        return True
    if not config.saves_checkpoints:
        return not plan.node_rank and not has_begun(Path(plan.run_dir))
    return not plan.node_rank or bool(lives.read(Path(plan.run_dir)))


def has_begun(run_dir: Path) -> bool:
    """Whether the run has done an update in its current life. What a life before has left may tell that it ran."""
    status = read_status(run_dir)
    return status.get("state") == "running" and status.get("life") == lives.number(run_dir)


def find(config: RunConfig, run_dir: Path, say: Callable[[str], None], folder_of: Callable[[str], Path]) -> Path | None:
    """Find the checkpoint that ``resume.path`` names; None if the run starts anew.

    Args:
        folder_of: the run's folder of an MLflow run id.

    Raises:
        UserError: there is none, or a run that could go on would be written over.
    """
    folder = _checkpoint(config, run_dir, say, folder_of)
    check_nothing_lost(config, run_dir, folder)
    return folder


def _checkpoint(
    config: RunConfig, run_dir: Path, say: Callable[[str], None], folder_of: Callable[[str], Path]
) -> Path | None:
    """The checkpoint that ``resume.path`` names; None: there is none to look for, or none yet."""
    path = config.resume.path
    if config.mode != "train" or path is None or path == FRESH:
        return None
    if path.lower() in YES_OR_NO:
        raise UserError(
            f"resume={path.lower()}",
            "says where from: auto, a folder, an MLflow run id, or fresh",
            f"{RUN_DIR}=FOLDER resume=auto",
        )
    if path == AUTO:
        if (newest := store.newest_to_go_on(run_dir / store.CHECKPOINTS, say)) is None:
            say(f"resume=auto: there is no checkpoint in {run_dir / store.CHECKPOINTS}; the run begins")
        return newest
    if RUN_ID.fullmatch(path) and not Path(path).exists():
        folder = _named(path, folder_of(path), say)
    else:
        folder = _named(path, Path(path).expanduser().absolute(), say)
    check_name(path, folder, run_dir)
    return folder


def _named(asked: str, path: Path, say: Callable[[str], None]) -> Path:
    """A checkpoint, or the newest of a run's folder.

    Args:
        asked: what was typed.

    Raises:
        UserError: it is none.
    """
    if (path / store.ABOUT).is_file():
        return store.check(path)
    for checkpoints in (path, path / store.CHECKPOINTS):
        if (folder := store.newest_whole(checkpoints, say)) is not None:
            return folder
    raise UserError(
        f"resume={asked}", f"there is no whole checkpoint in {path}", "resume=FOLDER of a run or of a checkpoint"
    )


def fit(config: RunConfig, plan: Plan, folder: Path, begins_anew: Callable[[], Sequence[str]] = tuple) -> Resume:
    """Check that a run can resume from a checkpoint with this config; returns the :class:`Resume`.

    Args:
        begins_anew: what of the optimizer's state is not carried over; asked once the strategy fits.

    Raises:
        UserError: the run cannot go on from it as it is configured.
    """
    about, mine = store.about(folder), own(folder, Path(plan.run_dir))
    about = replace(about, config=completed(about.config, public(config)))
    here, folder = mine is not None, mine or folder
    _check_strategy(plan, about, folder)
    if (about.servers or plan.roles.get("server")) and (why := _kept_in_servers(plan, about)):
        raise UserError(f"precision={plan.chosen.precision}", f"{folder} {why}", f"precision={about.precision}")
    if async_resume.other_workers(plan, about):
        async_resume.check(config, plan, about, folder)
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
    if plan.traits.lockstep and plan.total_steps < about.step:
        long_enough = f"epochs={about.step // max(1, plan.steps_per_epoch) + 1}"
        if config.max_steps:
            long_enough = f"max_steps={max(about.total_steps, about.step + 1)}"
        raise UserError(counted(plan.total_steps, "update"), f"{folder} is after update {about.step}", long_enough)
    other = tuple(versions.differences(about.versions, versions.installed()))
    return Resume(folder, about, here, matters, harmless, lost, other)


def _changes(config: RunConfig, plan: Plan, about: store.About) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How a run differs from the one that wrote the checkpoint: what matters to its training, and what does not."""
    matters, harmless = list[str](), list[str]()
    for key, line in differences(about.config, public(config), plan.strategy != about.strategy):
        if is_of(key, HARMLESS) or async_resume.counts_for_others(plan, about, key):
            harmless.append(line)
        elif key != PRECISION:
            matters.append(line)
    if arithmetic := _precision(plan, about):
        matters.append(arithmetic)
    others = async_resume.other_workers(plan, about)  # whose updates are as many together
    if not matters and about.total_steps != plan.total_steps and not others:
        matters = [f"the run had {about.total_steps} updates, and has {plan.total_steps}"]
    matters = matters or [*_other_order(config, plan, about), *(why for of in OTHER_NUMBERS for why in of(plan, about))]
    return tuple(matters), tuple(harmless)


def with_data(resume: Resume, now: str, config: RunConfig, task: str) -> Resume:
    """The same, with the data compared.

    Args:
        now: their fingerprint.
        task: of the data.

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
        line
        for line in begin_anew(measures_of(config, resume.about.config, True), config, task)
        if line not in resume.lost
    ]
    return replace(resume, matters=matters, lost=(*resume.lost, *anew))


def with_classes(resume: Resume, other: str, allowed: bool) -> Resume:
    """The same, with the classes compared.

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
    return replace(plan, lease_batches=blocks) if blocks else plan


def _check_global_batch(plan: Plan, about: store.About, folder: Path) -> None:
    """As many samples in an update as before.

    Raises:
        UserError: there are more or fewer.
    """
    if about.global_batch_size != plan.global_batch_size:
        why = f"an update has {plan.global_batch_size} samples, and had {about.global_batch_size} in {folder}"
        raise UserError(f"{plan.workers} workers", why, f"data.global_batch_size={about.global_batch_size}")


def _other_order(config: RunConfig, plan: Plan, about: store.About) -> Iterator[str]:
    """Why the samples of an epoch would come in another order."""
    sampler = config.sampler
    before, now = (about.workers, about.config.get("sampler", {}).get("pad")), (plan.workers, sampler.pad)
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
    before, now = about.strategy, plan.strategy
    if before != now and {before, now} <= {*ALIKE, SYNC}:
        if SYNC in (before, now) and (kept := _kept_at_one_place(plan, about)):
            raise UserError(f"strategy={now}", f"{folder} is of strategy={before}, and {kept}", f"strategy={before}")
        return
    if before != now:
        raise UserError(f"strategy={now}", f"{folder} is of strategy={before}", f"strategy={before}")
    if now in (*ALIKE, SYNC, *async_resume.STRATEGIES):
        return
    if about.workers != plan.workers and not plan.traits.replicas:
        why = f"{folder} has {about.workers} workers, each with a state of its own"
        raise UserError(f"{plan.workers} workers", why, f"launch.workers={about.workers}")
    if about.servers != (servers := plan.roles.get("server", 0)):
        why = f"{folder} has {about.servers} servers, each with its own count of the work that is done"
        raise UserError(f"launch.servers={servers}", why, f"launch.servers={about.servers}")


def _kept_at_one_place(plan: Plan, about: store.About) -> str:
    """What workers and servers cannot hand over to each other; empty: nothing."""
    told = completed(about.config.get("strategy", {}), {"entry": asdict(Entry())}, "strategy.")
    if about.strategy == SYNC and (wire := told.get("wire", "full")) != "full":
        return f"what strategy.wire={wire} has rounded off would be lost"
    if told.get("comm_hook") == "powersgd":
        return "what strategy.comm_hook=powersgd has left out would be lost"
    if about.strategy == SYNC and (told.get("evict_after") is not None or told.get("entry") != asdict(Entry())):
        return "workers that keep whole tables neither drop rows nor let them in late"
    if plan.strategy == SYNC and not plan.traits.exact:
        return "with these options of pserver_sync the updates would be others"
    return ""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], other_strategy: bool) -> Iterator[tuple[str, str]]:
    """Yield each config key whose value differs, and how.

    Left out are keys of the command alone, another strategy's own (not clipping), and new ones with their defaults.
    """
    old, new = dict(leaves(completed(before, now), "")), dict(leaves(now, ""))
    for key in sorted(old.keys() | new.keys()):
        own = other_strategy and key.startswith("strategy.") and key not in CLIPS
        if old.get(key) != new.get(key) and not own and not is_of(key, OF_THE_COMMAND):
            yield key, f"{key} was {old.get(key)}, is {new.get(key)}"


def _precision(plan: Plan, about: store.About) -> str:
    """How the precision differs from the checkpoint's, or '' if it does not; of ``auto``, what it stands for counts."""
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
    yield from lost(plan, about)


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
    if plan.traits.replicas and about.workers != plan.workers:
        yield f"the run had {counted(about.workers, 'worker')}, each with a replica of its own, and has {plan.workers}"


def _other_errors(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if workers with compression errors are now more or fewer."""
    told = about.config.get("strategy", {})
    for option, value in (("comm_hook", "powersgd"), ("wire", "int8")):
        if told.get(option) == value and about.workers != plan.workers:
            yield (
                f"the run had {counted(about.workers, 'worker')}, each with what strategy.{option}={value} has "
                f"left out, and has {plan.workers}"
            )


def _kept_in_servers(plan: Plan, about: store.About) -> str:
    """Return why parameter servers cannot take over the checkpoint's values (float32 or float64), or ''."""
    kinds = [64 if which == FP64 else 32 for which in (about.precision, plan.chosen.precision)]
    return (
        "" if kinds[0] == kinds[1] else f"is of precision={about.precision}, and servers keep float{kinds[0]} as it is"
    )


OTHER_NUMBERS = (_other_replicas, _other_errors, async_resume.other_numbers)
"""Each tells why updates are others where there are more or fewer workers or servers than before."""
