"""The command that repeats a run from its beginning."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config.keys import key_of
from trainer.config.redact import command
from trainer.config.run_config import RunConfig
from trainer.host import torchrun
from trainer.host.engine_tasks import MPI, SLURM, SUBMITTED, tasks_of
from trainer.run_folder.lives import LifeRecord

AUTO, FRESH = "auto", "resume=fresh"
BATCH_SIZE = "data.batch_size"
BY_HAND = ("launch.env=", "launch.node_rank=", "launch.role=")
"""Overrides by which the user says which process of the run this is."""
OF_RESUMING = ("resume", "resume.path", "resume.allow_changes")


def starter(overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> list[str]:
    """The words before the overrides: ``python -m trainer``, alone or after torchrun, srun or mpirun."""
    if "TORCHELASTIC_RUN_ID" not in environment or not torchrun.is_rank(environment):
        return [*_engines_starter(overrides, environment), "python", "-m", "trainer"]
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    size, here, address, port = (environment.get(name, "") for name in names)
    hosts = [f"--nnodes={int(size) // int(here)}"] if int(size) > int(here) else []
    meeting = ["--node-rank=0", f"--master-addr={address}", f"--master-port={port}"]
    return ["torchrun", *hosts, f"--nproc-per-node={here}", *(meeting if hosts else []), "-m", "trainer"]


def _engines_starter(overrides: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The words of srun or mpirun that start as many tasks; [] if the user has said which process this is, or a
    submitted job."""
    if SUBMITTED in environment or any(word.startswith(BY_HAND) for word in overrides):
        return []
    task = next((one for one in tasks_of(environment) if one.of.engine in (SLURM, MPI) and (one.size or 1) > 1), None)
    if task is None:
        return []
    hosts = [f"-N{task.hosts}"] if task.of.engine == SLURM and (task.hosts or 1) > 1 else []
    return [task.of.launcher, *hosts, "-n", str(task.size)]


def words(config: RunConfig, overrides: Sequence[str], lives: Sequence[LifeRecord], run_dir: Path) -> list[str]:
    """The words of the command that repeats a run; [] if its lives may have trained differently
    (``resume.allow_changes``).

    A run that was resumed in its own folder is repeated from its beginning; a run that resumed another run's
    checkpoint, from that checkpoint.

    Args:
        overrides: as typed, after the flags.
    """
    path = config.resume.path
    folder = os.path.realpath(run_dir)
    own = path == AUTO or (path is not None and Path(os.path.realpath(path)).is_relative_to(folder))
    typed = (key_of(word) for life in lives for word in shlex.split(life.command))
    if own and len(lives) > 1 and (config.resume.allow_changes or "resume.allow_changes" in typed):
        return []
    again = [*(o for o in overrides if key_of(o) not in OF_RESUMING), FRESH] if own else overrides
    return [*starter(overrides), *(command([override]) for override in again)]


def repeatable(overrides: Sequence[str], size: int | None) -> list[str]:
    """The overrides that repeat a command with this batch size and without a search; unchanged if ``size`` is None."""
    if size is None:
        return list(overrides)
    fixed = f"{BATCH_SIZE}={size}"
    replaced = [fixed if key_of(o) == BATCH_SIZE else o for o in overrides]
    return replaced if fixed in replaced else [*replaced, fixed]
