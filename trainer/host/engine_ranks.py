"""Joins the tasks that srun or mpirun has started, where they need more than their variables say.

Several tasks on a host become ranks as of torchrun, and tasks of mpirun need host 0's address. Task 0 leaves a note
with its address, a port and a new secret, and the others read it: in a private folder on one host, else below the
folder of the runs, which the hosts share. What is found here becomes environment variables, before anything else is
decided.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import RunFailed, UserError
from trainer.host import addresses, private, torchrun
from trainer.host.engine_tasks import COPIES, MPI, RUN_DIR, SECRET, SLURM, SUBMITTED, EngineTask, joined_tasks
from trainer.host.first_host import first_host

MEET_S = 300.0
"""Longest wait for task 0's note."""
POLL_S = 0.2
NAMES = {
    SLURM: ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    MPI: ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
}
"""Variables that all tasks of a step have in common, and no other step has."""
BY_HAND = ("launch.nnodes=", "launch.role=", "launch.ips=")
"""Overrides by which the user says which process this is; a job that this product has submitted starts all of them."""


@dataclass(frozen=True)
class Note:
    """What task 0 leaves for the others: where it listens, and the secret of this run."""

    address: str
    port: int
    secret: str


def adopt(environment: MutableMapping[str, str], words: Sequence[str]) -> None:
    """Set the variables of this task, where an engine has started it as one of several.

    Args:
        words: of the command line; ``launch.env`` counts.

    Raises:
        UserError: task 0's note cannot be seen from here.
    """
    typed = next((word.partition("=")[2] for word in reversed(words) if word.startswith("launch.env=")), "auto")
    by_hand = environment.get(SUBMITTED) != MPI and any(word.startswith(BY_HAND) for word in words)
    if torchrun.is_rank(environment) or by_hand:
        return
    tasks = joined_tasks(environment, typed)
    task = next((one for one in tasks if (one.size or 1) > 1 and (one.is_host or one.is_worker)), None)
    if task is None or (task.is_host and (task.of.engine != MPI or _names_host_0(words) or COPIES in environment)):
        return
    note = _leave_note(task, environment, words) if task.rank == 0 else _read_note(task, environment, words)
    environment.update(MASTER_ADDR=note.address, MASTER_PORT=str(note.port))
    environment.setdefault(SECRET, note.secret)
    if task.is_worker:
        environment.update(
            {torchrun.RANKS: task.of.launcher, "RANK": str(task.rank), "WORLD_SIZE": str(task.size)},
            LOCAL_RANK=str(task.local),
            LOCAL_WORLD_SIZE=str(task.here),
        )


def _names_host_0(words: Sequence[str]) -> bool:
    return any(word.startswith("launch.master_addr=") for word in words)


def _leave_note(task: EngineTask, environment: MutableMapping[str, str], words: Sequence[str]) -> Note:
    """Task 0: choose a port at an address that all tasks reach, and leave the note; it is removed at the end."""
    typed = next((w.partition("=")[2] for w in words if w.startswith("launch.master_addr=")), "")
    if task.size == task.here:
        address = addresses.LOOPBACK
    else:
        address = typed or task.address or first_host(task.of.engine, task.host, environment) or addresses.address()
    port = task.port or addresses.free_port(address)
    note = Note(address, port, environment.get(SECRET) or secrets.token_hex(32))
    path = _note(task, environment, words)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.write(path, json.dumps(asdict(note)))
    atexit.register(_remove, path, os.getpid())
    return note


def _remove(path: Path, process: int) -> None:
    """Remove the note, in the process that has left it, and in no child."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()


def _read_note(task: EngineTask, environment: MutableMapping[str, str], words: Sequence[str]) -> Note:
    """Any other task: wait for the note of a task 0 that listens."""
    path, until = _note(task, environment, words), time.monotonic() + MEET_S
    while time.monotonic() < until:
        with suppress(OSError, ValueError, TypeError):
            note = Note(**json.loads(private.read(path)))
            if _answers(note.address, note.port):  # else it is of an earlier command that was killed
                return note
        time.sleep(POLL_S)
    if task.size == task.here:
        raise RunFailed(f"task 0 of {task.of.launcher} has left no note in {path.parent} within {MEET_S:g} s")
    raise UserError(
        f"task {task.rank} of {task.of.launcher}",
        f"sees no note of task 0 in {path.parent} within {MEET_S:g} s: the hosts do not share that folder, or task 0 "
        f"has ended",
        "hydra.run.dir=FOLDER on a disk that all hosts share, or launch.master_addr=ADDRESS with one task on each host",
    )


def _answers(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=5):
        return True
    return False


def _note(task: EngineTask, environment: MutableMapping[str, str], words: Sequence[str]) -> Path:
    """The path of the note, the same for all tasks of this command."""
    parts = [environment.get(name, "") for name in NAMES.get(task.of.engine, ())]
    step = "\0".join([task.of.launcher, *parts, os.getcwd(), *words])
    key = hashlib.sha256(step.encode(errors="surrogateescape")).hexdigest()[:16]
    if task.size == task.here:
        return Path(private.temporary_root()) / f"trainer-tasks-{os.geteuid()}-{key}" / "note"
    typed = next((w.partition("=")[2] for w in reversed(words) if w.startswith("hydra.run.dir=")), "")
    typed = environment.get(RUN_DIR) or typed
    runs = Path(typed).parent if typed and "${" not in typed else Path("outputs")
    return runs.absolute() / f".tasks-{key}" / "note"
