"""Submits a command to an engine, and follows it: ``launch=slurm`` and the like."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.arguments import typed_keys
from trainer.config.instantiate import call_target
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import Job, Needs, Submitter
from trainer.launch.engines.follow import follow
from trainer.planning.checked_config import Checked
from trainer.planning.launcher import Launcher
from trainer.planning.validate import check
from trainer.terminal.screen import Screen

if TYPE_CHECKING:
    from omegaconf import DictConfig


def made_submitter(config: DictConfig) -> Submitter | None:
    """Make the launcher that ``launch._target_`` names; None: it is no submitter, or this command is in its job.

    Raises:
        UserError: it is no launcher, or does not take its keys.
    """
    launcher = call_target(compose.plain(config)["launch"], "launch", kind=Launcher)
    return launcher if isinstance(launcher, Submitter) and launcher.submits else None


def submit(config: DictConfig, launcher: Submitter, words: Sequence[str]) -> Result:
    """Check a command, submit it and follow it to its end.

    Args:
        words: flags and overrides, as typed.

    Raises:
        UserError: the command would be refused, or the engine refuses it.
        RunFailed, Interrupted: as the job ended; the exit code is the job's.
    """
    checked = check({**compose.plain(config), "plan": True}, typed_keys(words), elsewhere=True)
    for error in checked.lacks.errors:
        raise error
    folder = compose.named_folder(config, "hydra.run.dir")
    job = job_of(checked, folder, words, launcher)
    if text := launcher.printed(job):
        sys.stdout.write(text)
        return Result("planned", str(folder), mode=checked.config.mode)
    if not hand_over(job, launcher):
        return Result("submitted", str(folder), mode=checked.config.mode)
    return read_result(str(folder), "done", "")


def hand_over(job: Job, launcher: Submitter) -> bool:
    """Submit a job, and follow it to its end; returns whether it was followed (``launch.wait``).

    Raises:
        UserError: the engine refuses the job.
        RunFailed, Interrupted: as the job ended; the exit code is the job's.
    """
    out = Screen()
    for concern in launcher.concerns(job):
        out.print(f"ATTENTION: {concern}", style="bold yellow", soft_wrap=True)
    handle = launcher.submit(job)
    out.print(f"{handle.name}   (log {handle.log}; cancel: {handle.cancels})", soft_wrap=True)
    if launcher.options.wait:
        follow(handle, sys.stdout)
    return bool(launcher.options.wait)


def job_of(checked: Checked, folder: Path, words: Sequence[str], launcher: Submitter) -> Job:
    """The job of a checked command."""
    config, options, launch = checked.config, launcher.options, checked.config.launch
    gpus = options.gpus
    if gpus is None and config.device == "cuda":
        gpus = launch.nproc or 1
    setup: Any = options.setup
    return Job(
        name=config.name,
        words=tuple(words),
        folder=folder,
        command=tuple(shlex.split(options.python)) if options.python else (sys.executable,),
        started_in=os.getcwd(),
        hosts=launch.nnodes,
        least_hosts=launch.least_nnodes or 0,
        workers=launch.workers or (launch.nproc and launch.nproc * launch.nnodes),
        servers=checked.declaration.roles(checked.workers, launch).get("server", 0),
        needs=Needs(options.cores, options.memory, gpus),
        max_restarts=launch.max_restarts,
        max_preemptions=options.max_preemptions,
        grace_s=config.checkpoint.grace_s,
        options=options.options,
        setup=(setup,) if isinstance(setup, str) else tuple(setup or ()),
    )
