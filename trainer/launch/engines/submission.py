"""Lets one command at a time submit a job for a run's folder, from the question whether one lives to the file that
says so (``RUN/engine/job``)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import UserError, why
from trainer.host import engine_tasks
from trainer.host.engine_tasks import LAUNCHER_VARIABLES, LAUNCHERS, tasks_of
from trainer.host.torchrun import RANKS
from trainer.launch.engines.engine_folder import missing, unmake
from trainer.run_folder.folder_lock import FILE, FolderLock
from trainer.wording import counted

PATIENCE_S = 300.0
"""Longest wait for another command: it may wait for the end of a job, and the engine for an answer."""
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of Slurm that say where it is, and not in which job a process is."""
OF_TASKS = {
    name
    for one in LAUNCHERS
    for name in (one.size, one.rank, one.here, one.local, one.hosts, one.host, one.address, one.port, one.processes)
} | {*LAUNCHER_VARIABLES, RANKS, "LOCAL_RANK"}
"""Variables of the tasks of launchers."""
OF_JOBS = (
    engine_tasks.SUBMITTED,
    engine_tasks.RUN_DIR,
    engine_tasks.RESUME,
    engine_tasks.SWEEP_DIR,
    engine_tasks.SWEPT,
    engine_tasks.CARRIED,
    engine_tasks.CARRIED_CONFIG,
    engine_tasks.FROZEN,
    engine_tasks.OTHER_CODE,
    engine_tasks.COPIES,
    engine_tasks.NAMED,
    engine_tasks.LIFE,
    engine_tasks.ROLE,
    engine_tasks.SERVER_ENDPOINTS,
    engine_tasks.WORKER_ENDPOINTS,
)
"""Variables of the jobs that this product has submitted."""


@contextmanager
def submitting(folder: Path, key: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Context manager: no other command submits a job for this engine folder, which is made. Folders that were not
    there before are removed again if nothing is left in them.

    Args:
        key: of the folder above it; of a sweep ``hydra.sweep.dir``.

    Raises:
        UserError: the folder cannot be written, or another command does not come to an end.
    """
    what, instead = f"{key}={folder.parent}", f"{key}=ANOTHER_FOLDER"
    try:
        made = missing([folder])
        try:
            hold = _held(folder, what, say)
            try:
                yield
            finally:
                if hold.descriptor >= 0:
                    with suppress(OSError):
                        hold.path.unlink(missing_ok=True)  # who waits for it makes another one
                hold.leave()
        finally:
            unmake(made)
    except OSError as error:
        if not _concerns(error, folder):
            raise
        raise UserError(what, f"cannot be written: {why(error)}", instead) from error


def _held(folder: Path, what: str, say: Callable[[str], None]) -> FolderLock:
    """The lock of the folder, held alone.

    Raises:
        UserError: another command holds it for too long, or the lock file cannot be opened.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        hold = FolderLock(folder)
        if not hold.take_within(
            until - time.monotonic(), lambda: say("waits for another command that submits a job for this folder")
        ):
            reason = "another command submits a job for it, and has not ended"
            shut = hold.shut
            raise UserError(what, shut.why if shut else reason, shut.instead if shut else "the same command again")
        if _is_the_file(hold) if hold.descriptor >= 0 else folder.is_dir():
            return hold
        hold.leave()


def _is_the_file(hold: FolderLock) -> bool:
    """Whether the lock is on the file that is there now: who held it before has removed it."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(hold.descriptor), (hold.path.parent / FILE).stat())
    return False


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether an error is of a file of the run or the sweep, or of a folder above; one of a full disk names none."""
    if error.filename is None:
        return True
    path = Path(os.fsdecode(error.filename))
    return path.is_relative_to(folder.parent) or folder.is_relative_to(path)


def refuse_tasks(what: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to submit from one of several tasks: each of them would submit the run.

    Args:
        what: the key that chooses the engine.

    Raises:
        UserError: a launcher has started this command several times.
    """
    for task in tasks_of(environment):
        one, size = task.of, task.size or task.rank + 1
        if size == 1 or (one.both and one.rank not in environment):
            continue
        names = dict.fromkeys(name for name in (one.size, one.rank) if name in environment)
        said = " ".join(f"{name}={environment[name]}" for name in names)
        many = counted(task.size, "task") if task.size else "several tasks"
        reason = f"{one.launcher} has started this command as {many} ({said}), each of which would submit the run"
        raise UserError(what, reason, f"the command without {one.launcher}; or launch=local in its place")


def outside_of_tasks(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what says which task of which job this process is: the job would take it for its own.
    Outside of a job of Slurm, SLURM_* are the user's own settings."""
    of_slurm = ("SLURM_",) if "SLURM_JOB_ID" in environment else ()
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not (name in OF_TASKS or name in OF_JOBS or name.startswith(of_slurm))
    }
