"""Submits a command to an engine, and follows it: ``launch=slurm`` and the like."""

from __future__ import annotations

import base64
import io
import os
import shlex
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.remote import address_of
from trainer.cli import compose
from trainer.cli.arguments import typed_keys
from trainer.config.instantiate import call_target
from trainer.errors import UserError
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import Job, Needs, Submitter
from trainer.launch.engines.copies import Away, Copies
from trainer.launch.engines.follow import follow
from trainer.planning.checked_config import Checked
from trainer.planning.launcher import Launcher
from trainer.planning.tracking_store import named, tracking_uri
from trainer.planning.validate import check
from trainer.run_folder import tracking_file
from trainer.terminal.screen import Screen

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config.run_config import RunConfig

CONFIG_DIR = "--config-dir"
MOST_CONFIG = 96 << 10
"""Bytes; Linux has 128 KiB for a variable."""


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
    job = job_of(checked, folder, words, launcher, compose.names_whole(config, "hydra.run.dir"))
    if text := launcher.printed(job):
        sys.stdout.write(text)
        return Result("planned", str(folder), mode=checked.config.mode)
    if not hand_over(job, launcher, checked.config):
        return Result("submitted", str(folder), mode=checked.config.mode)
    return replace(read_result(str(folder), "done", ""), run_dir=str(folder))


def hand_over(job: Job, launcher: Submitter, config: RunConfig) -> bool:
    """Submit a job, and follow it to its end; returns whether it was followed (``launch.wait``).

    Raises:
        UserError: the engine refuses the job.
        RunFailed, Interrupted: as the job ended; the exit code is the job's.
    """
    out = Screen()

    def say(line: str) -> None:
        out.print(line, style="bold yellow", soft_wrap=True)

    for concern in launcher.concerns(job):
        say(f"ATTENTION: {concern}")
    if job.copies and tracking_uri(config.tracking).startswith("sqlite"):
        say(
            f"ATTENTION: {named(config.tracking)} is a file, and the hosts' disks end with the job: what MLflow is to "
            f"keep needs tracking.uri=http://SERVER:PORT, which all hosts reach"
        )
    places = [Copies(one.copies, one.folder) for one in job.points or (job,) if one.copies]
    for place in places:
        place.begin()
    if job.points and job.copies:
        Copies(job.copies, job.folder).give(tracking_file.FILE)
    handle = launcher.submit(job)
    if places:
        handle = Away(handle, places, say)
        if not launcher.options.wait:
            out.print(f"Its files come to {job.copies}, and not to this machine (launch.wait=false)", soft_wrap=True)
    out.print(f"{handle.name}   (log {handle.log}; cancel: {handle.cancels})", soft_wrap=True)
    if launcher.options.wait:
        follow(handle, sys.stdout)
    return bool(launcher.options.wait)


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
    gpus = options.gpus
    if gpus is None and config.device == "cuda":
        gpus = launch.nproc or 1
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
        needs=Needs(options.cores, options.memory, gpus),
        max_restarts=launch.max_restarts,
        max_preemptions=options.max_preemptions,
        grace_s=config.checkpoint.grace_s,
        options=options.options,
        setup=(setup,) if isinstance(setup, str) else tuple(setup or ()),
        copies=copies,
        config=packed,
    )


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
