"""Submits a command to an engine, and follows it: ``launch=slurm`` and the like."""

from __future__ import annotations

import base64
import io
import os
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.remote import Remote, address_of
from trainer.cli import compose
from trainer.cli.after_job import end_tracking, how_to_go_on
from trainer.cli.arguments import typed_keys
from trainer.cli.last_lines import INDENT, short
from trainer.config.instantiate import call_target
from trainer.config.keys import key_of
from trainer.config.redact import command
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host.symlink_checks import check_run_folder
from trainer.job.check import get_ready
from trainer.job.claim_folder import wait_for_the_life_before
from trainer.job.fetch_checkpoints import check_no_copies
from trainer.job.ready import Ready
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import Handle, Job, Living, Needs, Submitter, Unreachable
from trainer.launch.engines.copies import Away, Copies
from trainer.launch.engines.engine_folder import SubmittedJob
from trainer.launch.engines.follow import JobFailed, follow
from trainer.launch.engines.submission import refuse_tasks, submitting
from trainer.planning.checked_config import Checked
from trainer.planning.find_checkpoint import AUTO, FRESH
from trainer.planning.launcher import Launcher
from trainer.planning.tracking_store import named, tracking_uri
from trainer.planning.validate import check
from trainer.run_folder import tracking_file
from trainer.terminal.screen import Screen
from trainer.wording import counted, override

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config.run_config import RunConfig

RUN_DIR, SWEEP_DIR, WAIT = "hydra.run.dir", "hydra.sweep.dir", "launch.wait"
RESUMES = ("resume=auto", "resume.path=auto", "sweep.resume=true")
LEAVES_S = 120.0
"""Longest wait for a job that was asked to end: Slurm's KillWait, and what it needs besides."""
CONFIG_DIR = "--config-dir"
MOST_CONFIG = 96 << 10
"""Bytes; Linux has 128 KiB for a variable."""


def made_submitter(config: DictConfig) -> Submitter | None:
    """Make the launcher that ``launch._target_`` names; None: it is no submitter, or this command is in its job.

    Raises:
        UserError: it is no launcher, or does not take its keys.
    """
    launcher = call_target(compose.plain(config)["launch"], "launch", kind=Launcher)
    if not isinstance(launcher, Submitter) or not launcher.submits:
        return None
    launcher.check_places()
    if launcher.options.env != "none":
        refuse_tasks(f"launch={launcher.engine}" if launcher.engine else "launch._target_")
    return launcher


def submit(
    config: DictConfig, launcher: Submitter, words: Sequence[str], show_only: Callable[[Ready], Result]
) -> Result:
    """Check a command, submit it and follow it to its end.

    Args:
        words: flags and overrides, as typed.
        show_only: what ``plan=true`` does in place of a submission.

    Raises:
        UserError: the command would be refused, or the engine refuses it.
        RunFailed, Interrupted: as the job ended; the exit code is the job's.
    """
    folder, whole = compose.named_folder(config, RUN_DIR), compose.names_whole(config, RUN_DIR)
    # For a plan, nothing is asked of this host alone, such as whether a port is free.
    plain, typed = {**compose.plain(config), "plan": True}, typed_keys(words)
    wholly = partial(get_ready, plain, typed, str(folder), whole=whole, away=True)
    if compose.plain(config).get("plan"):
        return show_only(wholly())
    checked = _without_lacks(check(plain, typed, elsewhere=True))
    job = job_of(checked, folder, words, launcher, whole)
    if launcher.freezes:
        job = replace(job, frozen=compose.frozen(config))
    if text := launcher.printed(job):
        sys.stdout.write(text)
        return Result("planned", str(folder), mode=checked.config.mode)
    commands = Commands.of(words, RUN_DIR, folder)
    living = living_job(launcher, [job.engine_folder], RUN_DIR, words)
    if living is None and launcher.sees(folder):
        check_run_folder(folder, config.hydra.output_subdir)
        wait_for_the_life_before(folder, lambda line: print(line, flush=True))
        _without_lacks(wholly(checked=checked).checked)
    alone = living is None and launcher.holds(folder)
    with submitting(job.engine_folder, RUN_DIR) if alone else nullcontext():
        living = living or living_job(launcher, [job.engine_folder], RUN_DIR, words)
        handle = handed_over(job, launcher, checked.config, living)
    if not followed(handle, job, launcher, commands, living is not None and living.is_over):
        return Result("submitted", str(folder), mode=checked.config.mode)
    return replace(read_result(str(folder), "done", ""), run_dir=str(folder))


def _without_lacks(checked: Checked) -> Checked:
    """Raise the first reason why the run would be refused."""
    for error in checked.lacks.errors:
        raise error
    return checked


def living_job(launcher: Submitter, folders: Sequence[Path], key: str, words: Sequence[str]) -> Living | None:
    """The job that a command of these words follows in place of a new one: it lives for the first of these engine
    folders, or no command has shown its end yet. A job that ends is waited for.

    Args:
        key: of the folder; of a sweep ``hydra.sweep.dir``.

    Raises:
        UserError: a job of another command lives for one of them, or one does not end.
    """
    until, said = time.monotonic() + LEAVES_S, False
    while (living := launcher.living(folders)) is not None and living.leaves:
        if not said:
            print(f"waits for the end of {living.handle.name}", flush=True)
            said = True
        if time.monotonic() > until:
            why = f"{living.handle.name} was to end, and has not ended within {LEAVES_S:g} s"
            raise UserError(f"{key}={folders[0].parent}", why, f"the same command later; or {living.handle.cancels}")
        time.sleep(1)
    if living is None:
        return None
    if living.is_over:  # a command that resumes it is another one
        shows = launcher.options.wait or living.is_done
        return living if shows and own_words(living.words) == own_words(words) else None
    if bool(living.points) != (key == SWEEP_DIR) or same_words(living.words) != same_words(words):
        own = Commands.of(living.words, SWEEP_DIR if living.points else RUN_DIR, living.folder)
        why = f"{living.handle.name} of another command runs in this folder, or waits"
        instead = f"{own.follow}, which follows it; or {living.handle.cancels}"
        raise UserError(f"{key}={folders[0].parent}", why, instead)
    return living


def own_words(words: Sequence[str]) -> list[str]:
    """The words of a command without those that say where, or whether its job is followed."""
    return sorted(word for word in words if key_of(word) not in (WAIT, RUN_DIR, SWEEP_DIR))


def same_words(words: Sequence[str]) -> list[str]:
    """The words of a command in which commands differ that do not follow each other's living jobs."""
    return [word for word in own_words(words) if word not in RESUMES]


@dataclass(frozen=True)
class Commands:
    """What to type about a submitted job: the command that follows it, and the one that resumes its run."""

    follow: str
    resume: str

    @staticmethod
    def of(words: Sequence[str], key: str, folder: Path) -> Commands:
        """The commands for a job of these words.

        Args:
            key: of the folder; of a sweep ``hydra.sweep.dir``.
        """
        kept = [word for word in words if key_of(word) not in (WAIT, key)]
        start = ["python -m trainer", *(["-m"] if key == SWEEP_DIR else [])]
        there = override(key, short(folder))
        again = [word for word in kept if key_of(word) not in ("resume", "resume.path")]
        return Commands(
            " ".join([*start, command([*kept, there])]), " ".join([*start, command([*again, there, "resume=auto"])])
        )


def handed_over(job: Job, launcher: Submitter, config: RunConfig, living: Living | None = None) -> Handle:
    """Submit a job; returns it, or the one that lives.

    Args:
        living: the job of an earlier command that is followed in place of a new one.

    Raises:
        UserError: the engine refuses the job.
    """
    places = [Copies(one.copies, one.folder) for one in job.points or (job,) if one.copies]
    handle = _submitted(job, launcher, config, places) if living is None else living.handle
    return Away(handle, places, _warn) if places else handle


def _warn(line: str) -> None:
    Screen().print(line, style="bold yellow", soft_wrap=True)


def _submitted(job: Job, launcher: Submitter, config: RunConfig, places: Sequence[Copies]) -> Handle:
    if job.copies and tracking_uri(config.tracking).startswith("sqlite"):
        _warn(
            f"ATTENTION: {named(config.tracking)} is a file, and the hosts' disks end with the job: what MLflow is to "
            f"keep needs tracking.uri=http://SERVER:PORT, which all hosts reach"
        )
    for place in places:
        if config.mode == "train" and config.resume.path not in (AUTO, FRESH) and place.state() != "done":
            check_no_copies(config, Remote(place.address), place.folder)
    for place in places:
        place.begin()
    handle = launcher.submit(job)
    for concern in launcher.concerns(job):
        _warn(f"ATTENTION: {concern}")
    return handle


def released(handle: Handle, job: Job) -> None:
    """Let the held job of a sweep start, which finds the sweep's runs at its trackers in the sweep's folder.

    Raises:
        RunFailed: the engine does not answer.
    """
    if not handle.held:
        return
    if job.copies:
        Copies(job.copies, job.folder).give(tracking_file.FILE)
    try:
        handle.release()
    except Unreachable as error:
        raise RunFailed(f"{handle.name} is held, and is cancelled: it cannot be released: {error}") from None


def followed(handle: Handle, job: Job, launcher: Submitter, commands: Commands, is_over: bool = False) -> bool:
    """Follow a job to its end; returns whether it was followed (``launch.wait``).

    Args:
        is_over: it has ended already, and its end is shown.

    Raises:
        RunFailed, Interrupted: as the job ended; the exit code is the job's.
    """
    out, is_noted = Screen(), SubmittedJob.of(job.engine_folder) is not None
    handle.follows = handle.follows or (commands.follow if is_noted else "")
    handle.resumes = f"{'resume':<{INDENT}}{commands.resume}"
    out.print(f"{handle.name}   (log {handle.log}; cancel: {handle.cancels})", soft_wrap=True)
    if is_over:
        out.print("It has ended, and is not run again. To train anew: the command with another folder", soft_wrap=True)
    if launcher.options.wait or is_over:
        _follow(handle, job)
        return True
    if not launcher.freezes:
        _note(launcher, job, handle)
    if job.copies:
        out.print(f"Its files come to {job.copies}; the command that follows it brings them here", soft_wrap=True)
    if handle.follows:
        out.print(f"follow    {handle.follows}", soft_wrap=True)
    return False


def _note(launcher: Submitter, job: Job, handle: Handle) -> None:
    """Let ``python -m trainer ps`` show a job that this command does not follow. Without it the job runs as well."""
    from trainer.service import elsewhere

    try:
        elsewhere.note(launcher, job, handle.log)
    except (UserError, RunFailed) as error:
        _warn(f"ATTENTION: python -m trainer ps does not show it: {error}")


def _follow(handle: Handle, job: Job) -> None:
    """Follow a job; of one that ends without its run, the run ends at its trackers, and the last line says how to go
    on.

    Raises:
        RunFailed, Interrupted: as the job ended.
    """
    try:
        follow(handle, sys.stdout)
    except (Interrupted, JobFailed) as error:
        if error.exit_code != UserError.exit_code:
            end_tracking([point.folder for point in job.points] or [job.folder])
            if not getattr(error, "__notes__", ()):
                error.add_note(how_to_go_on(job.folder, handle.resumes, bool(job.points or job.copies)))
        raise


def job_of(checked: Checked, folder: Path, words: Sequence[str], launcher: Submitter, whole: bool) -> Job:
    """The job of a checked command.

    Args:
        whole: the user named the folder by its whole path.

    Raises:
        UserError: the hosts share no disk, which this engine needs, or nothing says where their files go.
    """
    config, options, launch = checked.config, launcher.options, checked.config.launch
    words, packed, copies = tuple(words), "", ""
    if not options.shared_storage:
        if not launcher.runs_apart:
            why = f"{type(launcher).__name__} runs its jobs on hosts that share the run folder"
            raise UserError("launch.shared_storage=false", why, "launch.shared_storage=true")
        words, packed = _with_config(words)
        copies = copies_of(config, folder, whole)
    setup: Any = options.setup
    return Job(
        name=config.name,
        words=words,
        folder=folder,
        command=tuple(shlex.split(options.python)) if options.python else (sys.executable,),
        started_in=os.getcwd(),
        hosts=launch.nnodes,
        least_hosts=launch.least_nnodes or 0,
        workers=launch.workers or (launch.nproc and launch.nproc * launch.nnodes),
        servers=checked.declaration.roles(checked.workers, launch).get("server", 0),
        needs=Needs(options.cores, options.memory, _gpus_of(config, launcher)),
        max_restarts=launch.max_restarts,
        max_preemptions=options.max_preemptions,
        grace_s=config.checkpoint.grace_s,
        options=options.options,
        setup=(setup,) if isinstance(setup, str) else tuple(setup or ()),
        copies=copies,
        config=packed,
    )


def _gpus_of(config: RunConfig, launcher: Submitter) -> int | None:
    """GPUs of a host; None: none are asked for, or an option of the engine's own asks for them.

    Raises:
        UserError: there are fewer than workers, none of them would be used, or two keys say how many.
    """
    nproc, gpus = config.launch.nproc, launcher.options.gpus
    found = launcher.gpus_in_options(config.launch.nnodes)
    if found is not None and gpus is not None:
        raise UserError(found[0], "launch.gpus is set as well", "launch.gpus alone")
    what, count = found or (f"launch.gpus={gpus}", gpus)
    if count and config.device == "cpu":
        raise UserError(what, "asks for GPUs, and device=cpu uses none", "device=cuda, or the command without it")
    if count is not None and config.device == "cuda" and count < (nproc or 1):
        instead = f"launch.gpus={nproc or 1}" + (f", or launch.nproc={count}" if count else ", or device=cpu")
        raise UserError(what, f"each of {counted(nproc or 1, 'worker')} of a host needs a GPU of its own", instead)
    return (nproc or 1) if count is None and config.device == "cuda" else gpus


def copies_of(config: RunConfig, folder: Path, whole: bool) -> str:
    """The address of the copies of a run whose hosts share no disk.

    Raises:
        UserError: ``checkpoint.to`` names none.
    """
    if (to := config.checkpoint.to) is None:
        why = "the hosts' results, logs and checkpoints come back by an address, and checkpoint.to names none"
        raise UserError("launch.shared_storage=false", why, "checkpoint.to=s3://BUCKET/RUNS")
    return address_of(to, folder, whole)


def _with_config(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The words without ``--config-dir``, and the YAML files of its folder, packed.

    Raises:
        UserError: they are too large for a variable.
    """
    if CONFIG_DIR not in words:
        return tuple(words), ""
    place = words.index(CONFIG_DIR)
    folder, packed = Path(words[place + 1]), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(found for ending in ("*.yaml", "*.yml") for found in folder.rglob(ending)):
            archive.add(path.resolve(), str(path.relative_to(folder)))
    text = base64.b64encode(packed.getvalue()).decode()
    if len(text) > MOST_CONFIG:
        why = f"its YAML files, packed, have {len(text):,} bytes, and a job carries {MOST_CONFIG:,} at most"
        raise UserError(f"{CONFIG_DIR} {folder}", why, f"{CONFIG_DIR} FOLDER with this run's files alone")
    return (*words[:place], *words[place + 2 :]), text
