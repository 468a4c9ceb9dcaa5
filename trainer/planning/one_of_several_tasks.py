"""Refuses a command that a scheduler or ``mpirun`` has started several times, if each would be a run of its own.

The copies would train the same into one folder.
Which launcher has started a command is known from its variables: how many tasks the job has, and which of them this one
is. The variables are not used for more than that: ``launch.nnodes`` and ``launch.node_rank`` set the hosts of a run.
torchrun's variables are read in :mod:`trainer.launch.torchrun`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import torchrun


@dataclass(frozen=True)
class Tasks:
    """The variables of one launcher.

    Attributes:
        launcher: what has started the command.
        size: how many tasks there are; '' where no variable says it. rank: which of them this one is, from 0.
        here: how many of them are on this host. hosts: on how many hosts they are. host: which of these this one is.
        once: the command that starts one task; '' where a manifest says how many there are.
        of_processes: size counts processes to be, of which a task has several.
        both: size says something only beside rank: alone it may count what nobody has started.
        first: rank of the first task. Where it is 1, that is the batch script, and ranks say nothing of hosts.
    """

    launcher: str
    size: str
    rank: str
    here: str = ""
    hosts: str = ""
    host: str = ""
    once: str = ""
    of_processes: bool = False
    both: bool = False
    first: int = 0


SLURM = Tasks("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "srun -n1")
KUBEFLOW = Tasks("Kubeflow", "PET_NNODES", "PET_NODE_RANK", host="PET_NODE_RANK")
PYTORCH = Tasks(
    "a launcher that sets WORLD_SIZE", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", host="RANK", of_processes=True
)
PADDLE = Tasks("a launcher of Paddle Fleet", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID")
LAUNCHERS = (
    Tasks("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", once="jsrun -n 1"),
    Tasks("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", once="mpirun -n 1"),
    Tasks("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", once="mpirun -n 1"),
    Tasks("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", once="mpirun -n 1"),
    Tasks("mpirun", "", "PMIX_RANK", once="mpirun -n 1"),
    Tasks("mpirun", "", "PALS_RANKID", once="mpirun -n 1"),
    Tasks("aprun", "", "ALPS_APP_PE", once="aprun -n 1"),
    Tasks("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", once="horovodrun -np 1"),
    Tasks("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", hosts="FLUX_JOB_NNODES", once="flux run -n 1"),
    SLURM,
    Tasks("blaunch", "LSB_DJOB_NUMPROC", "LSF_PM_TASKID", both=True),
    Tasks("pbsdsh", "", "PBS_TASKNUM", first=1),
    PADDLE,
    KUBEFLOW,
    PYTORCH,
    Tasks("a launcher that sets NNODES", "NNODES", "NODE_RANK", hosts="NNODES", host="NODE_RANK", both=True),
    Tasks("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST", hosts="SM_HOSTS"),
    Tasks("a Job of Kubernetes", "", "JOB_COMPLETION_INDEX", host="JOB_COMPLETION_INDEX"),
    Tasks("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", host="AWS_BATCH_JOB_NODE_INDEX"),
)
"""Inner ones first: ``mpirun`` starts its tasks on other hosts by ``srun``."""
SLURM_ALL, SLURM_STEP = "SLURM_NTASKS", "SLURM_STEP_ID"
NO_STEP = 0xFFFF_FFF0
"""Slurm numbers what is no step of tasks from here: a batch script, an interactive shell."""
LAUNCHER_VARIABLES = (
    *(name for one in LAUNCHERS for name in (one.size, one.rank, one.here, one.hosts) if name),
    SLURM_ALL,
    SLURM_STEP,
)
"""Every variable that is read here."""


def check_alone(config: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a command that is one of several tasks of a job, if each would be a whole run, or the same host of one.

    Args:
        config: with its hosts filled in.

    Raises:
        UserError: with the variables that say so.
    """
    launch = config.launch
    if launch.env == "none" or launch.role is not None or torchrun.is_rank(environment):
        return
    for one in LAUNCHERS:
        if one is PYTORCH and _number(environment, KUBEFLOW.size) is not None:
            continue  # KUBEFLOW has answered: a pod may have several processes
        one = _of_slurm(environment) if one is SLURM else one
        size, rank = _number(environment, one.size), (_number(environment, one.rank) or one.first) - one.first
        if (one.both and one.rank not in environment) or (launch.nnodes > 1 and one.first):
            continue
        if launch.nnodes > 1 and one.of_processes:
            size = None
        if (size or rank + 1) > launch.nnodes:
            raise _refused(one, environment, launch.nnodes)


def _of_slurm(environment: Mapping[str, str]) -> Tasks:
    """Slurm's variables. In a batch script or a shell of salloc, SLURM_NTASKS counts tasks that are not started."""
    step = _number(environment, SLURM_STEP)
    if SLURM.size in environment or step is None or step >= NO_STEP:
        return SLURM if SLURM.size in environment else replace(SLURM, size="")
    return replace(SLURM, size=SLURM_ALL)


def _refused(one: Tasks, environment: Mapping[str, str], nnodes: int) -> UserError:
    names = dict.fromkeys(name for name in (one.size, one.rank) if name in environment)
    what = " ".join(f"{name}={environment[name]}" for name in names)
    size = _number(environment, one.size)
    tasks = f"{size} {'processes' if one.of_processes else 'tasks'} of one job" if size else "several tasks of one job"
    each = "this command would be a whole run by itself in each of them"
    if nnodes > 1:
        each = f"launch.nnodes={nnodes} is for one command on each host"
    return UserError(what, f"{one.launcher} starts {tasks}, and {each}", _instead(one, environment, size))


def _instead(one: Tasks, environment: Mapping[str, str], size: int | None) -> str:
    """What to type: the command once on one host, or once on each of several."""
    own = "launch.env=none if each task is a run of its own"
    if one is PADDLE:
        return f"launch.env=paddle; or {own}"
    here, hosts = _number(environment, one.here), _number(environment, one.hosts)
    if hosts is None and size and here:
        hosts = -(-size // here)
    number = f"'launch.node_rank=${{oc.env:{one.host}}}'" if one.host else "launch.node_rank=N"
    each = f"on each host one command with launch.nnodes={hosts or 'HOSTS'} {number} launch.master_addr=ADDRESS"
    if not one.once:
        return f"{each}; or {own}"
    once = f"{one.once} python -m trainer ... launch.nproc={size or 'WORKERS'}"
    if hosts == 1:
        return f"{once}; or {own}"
    return f"{each}; or {own}" if hosts else f"{once}; or {each}; or {own}"


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable: MAX of MIN:MAX, the length of a JSON list; None: it is not set, or no number."""
    word = environment.get(name, "").strip()
    if word.startswith("["):
        return word.count(",") + 1
    word = word.rpartition(":")[2]
    return int(word) if word.isascii() and word.isdecimal() else None
