"""Finds out which of an engine's tasks this process is: srun, mpirun, Kubernetes and others say it in variables.

A launcher that starts a command several times starts the tasks of one run, not several runs. With one task on each
host, a task is the launcher of its host. With several on a host, each task is a worker, as under torchrun: the first
leads, and the others join it. Of the launchers in :data:`LAUNCHERS` without an engine, the variables only say that
there are several tasks; those are refused with what to type (:mod:`trainer.planning.engine_hosts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

ENGINE = "engine"
"""The folder of an engine's files below that of a run."""
SUBMITTED = "TRAINER_SUBMITTED"
"""The engine whose job this process is in, where this product has submitted it."""
RUN_DIR, RESUME, SWEEP_DIR, SWEPT = "TRAINER_RUN_DIR", "TRAINER_RESUME", "TRAINER_SWEEP_DIR", "TRAINER_SWEPT"
"""What such a job hands to its processes: the run's folder, whether the run resumes there, and the folder and keys of
the sweep that it is a job of."""
CARRIED, COPIES, NAMED = "TRAINER_CARRIED", "TRAINER_COPIES", "TRAINER_NAMED"
"""Without a disk that the hosts share (``launch.shared_storage=false``): what a host gets of its command, as JSON; the
address of the run's copies; and the run's folder where the command was typed."""
CARRIED_CONFIG = "TRAINER_CARRIED_CONFIG"
"""The files of ``--config-dir`` for it, packed, where they come apart: from a Secret of Kubernetes."""
FROZEN, OTHER_CODE = "TRAINER_FROZEN", "TRAINER_OTHER_CODE"
"""From the queue: the file of the config as it was at the submission; and how the code has changed since, in words."""
LIFE = "TRAINER_LIFE"
"""The number of the life of such a job, where its batch script reads the hosts' exit codes."""
SLURM, MPI, KUBERNETES, RAY, TORCHRUN = "slurm", "mpi", "kubernetes", "ray", "torchrun"
SECRET = "TRAINER_RUN_SECRET"  # the name of a variable  # nosec B105
"""The secret by which the processes of a run on several hosts know each other."""
HOSTS, HOST = "TRAINER_HOSTS", "TRAINER_HOST"
"""Set by our own actors on the hosts of a Ray cluster: how many hosts the run has, and which this one is."""


@dataclass(frozen=True)
class Variables:
    """The variables of one launcher; '' where it has none for it.

    Attributes:
        launcher: in messages. engine: value of ``launch.env`` for it; '': its tasks are refused.
        size: how many tasks there are. rank: which of them this one is, from 0.
        here: how many of them are on this host. local: which of these this one is.
        hosts: on how many hosts they are. host: which of these this one is.
        address, port: where the first host is. processes: workers that a task is to have.
        once: the command that starts one task; '' where a manifest says how many there are.
        of_processes: size counts processes to be, of which a task has several.
        both: size says something only beside rank: alone it may count what nobody has started.
        first: rank of the first task. Where it is 1, that is the batch script, and ranks say nothing of hosts.
    """

    launcher: str
    size: str
    rank: str
    here: str = ""
    local: str = ""
    hosts: str = ""
    host: str = ""
    address: str = ""
    port: str = ""
    processes: str = ""
    once: str = ""
    engine: str = ""
    of_processes: bool = False
    both: bool = False
    first: int = 0


SRUN = Variables(
    "srun",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NODEID",
    "MASTER_ADDR",
    "MASTER_PORT",
    once="srun -n1",
    engine=SLURM,
)
KUBEFLOW = Variables(
    "Kubeflow",
    "PET_NNODES",
    "PET_NODE_RANK",
    hosts="PET_NNODES",
    host="PET_NODE_RANK",
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    processes="PET_NPROC_PER_NODE",
    engine=KUBERNETES,
)
PYTORCH = Variables(
    "a launcher that sets WORLD_SIZE",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
    host="RANK",
    address="MASTER_ADDR",
    port="MASTER_PORT",
    engine=TORCHRUN,
    of_processes=True,
)


def _mpirun(size: str, rank: str, here: str, local: str) -> Variables:
    """The variables of one of the MPIs, whose tasks can join one run."""
    return Variables(
        "mpirun", size, rank, here, local, address="MASTER_ADDR", port="MASTER_PORT", once="mpirun -n 1", engine=MPI
    )


PADDLE = Variables("a launcher of Paddle Fleet", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID")
JOB_INDEX = Variables("a Job of Kubernetes", "", "JOB_COMPLETION_INDEX", host="JOB_COMPLETION_INDEX", engine=KUBERNETES)
LAUNCHERS = (
    Variables("Ray", HOSTS, HOST, hosts=HOSTS, host=HOST, address="MASTER_ADDR", port="MASTER_PORT", engine=RAY),
    Variables("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", once="jsrun -n 1"),
    _mpirun("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _mpirun("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    _mpirun("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    Variables("mpirun", "", "PMIX_RANK", once="mpirun -n 1"),
    Variables("mpirun", "", "PALS_RANKID", once="mpirun -n 1"),
    Variables("aprun", "", "ALPS_APP_PE", once="aprun -n 1"),
    Variables("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", once="horovodrun -np 1"),
    Variables("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", hosts="FLUX_JOB_NNODES", once="flux run -n 1"),
    SRUN,
    Variables("blaunch", "LSB_DJOB_NUMPROC", "LSF_PM_TASKID", both=True),
    Variables("pbsdsh", "", "PBS_TASKNUM", first=1),
    PADDLE,
    KUBEFLOW,
    PYTORCH,
    Variables("a launcher that sets NNODES", "NNODES", "NODE_RANK", hosts="NNODES", host="NODE_RANK", both=True),
    Variables("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST", hosts="SM_HOSTS"),
    JOB_INDEX,
    Variables("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", host="AWS_BATCH_JOB_NODE_INDEX"),
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
"""Every variable that says how many tasks there are."""

ROLE, SERVER_ENDPOINTS, WORKER_ENDPOINTS = "TRAINER_ROLE", "TRAINER_SERVER_ENDPOINTS", "TRAINER_WORKER_ENDPOINTS"
"""Of a pod that is one process of a run: launch.role, and where all processes are. ``JOB_INDEX`` has its rank."""


@dataclass(frozen=True)
class EngineTask:
    """One of several tasks that a launcher has started.

    Attributes:
        of: the launcher's variables. size: how many tasks there are; None: unknown. rank: of this one, from 0.
        hosts: on how many hosts; None: unknown. host: the number of this one. here: how many tasks are on this host;
        None: unknown. local: the number of this one among them.
        address: of the first host; '': the variables do not say it. port: where the hosts meet; 0: unknown.
        processes: workers of each task; 0: unknown.
    """

    of: Variables
    size: int | None
    rank: int
    hosts: int | None
    host: int
    here: int | None
    local: int
    address: str = ""
    port: int = 0
    processes: int = 0

    @property
    def is_host(self) -> bool:
        """Whether each host has one task, which is the launcher of its host."""
        return self.here == 1 if self.here is not None else self.hosts is not None and self.hosts == self.size

    @property
    def is_worker(self) -> bool:
        """Whether this host has several tasks, each of which is a worker."""
        return self.here is not None and self.here > 1 and self.size is not None


def tasks_of(environment: Mapping[str, str]) -> list[EngineTask]:
    """List what each launcher's variables say of this process, inner launchers first.

    A batch script, and a shell of ``salloc``, is no task: what is counted there has not been started.
    """
    found = []
    for one in LAUNCHERS:
        if one is PYTORCH and number(environment, KUBEFLOW.size) is not None:
            continue  # KUBEFLOW has answered: a pod may have several processes
        one = _of_slurm(environment) if one is SRUN else one
        if one.rank in environment or number(environment, one.size) is not None:
            found.append(_task(one, environment))
    return found


def joined_tasks(environment: Mapping[str, str], env: str) -> list[EngineTask]:
    """Of these, the tasks that join one run: of the engine that ``launch.env`` names, or of any (``auto``)."""
    return [task for task in tasks_of(environment) if task.of.engine and env in ("auto", task.of.engine)]


def _task(one: Variables, environment: Mapping[str, str]) -> EngineTask:
    size, rank = number(environment, one.size), (number(environment, one.rank) or one.first) - one.first
    host, here = number(environment, one.host), number(environment, one.here)
    if one.engine == SLURM:
        here = _tasks_on_host(environment.get(one.here, ""), host or 0)
    hosts = number(environment, one.hosts)
    if hosts is None and size and here:
        hosts = -(-size // here)
    return EngineTask(
        one,
        size,
        rank,
        hosts,
        rank if host is None else host,
        here,
        number(environment, one.local) or 0,
        environment.get(one.address, "").strip(),
        number(environment, one.port) or 0,
        number(environment, one.processes) or 0,
    )


def _of_slurm(environment: Mapping[str, str]) -> Variables:
    """Slurm's variables. In a batch script or a shell of salloc, SLURM_NTASKS counts tasks that were not started."""
    step = number(environment, SLURM_STEP)
    if SRUN.size in environment or step is None or step >= NO_STEP:
        return SRUN if SRUN.size in environment else replace(SRUN, size="")
    return replace(SRUN, size=SLURM_ALL)


def _tasks_on_host(counts: str, host: int) -> int | None:
    """How many tasks a host has, of ``2(x3),1``: two on each of three hosts, one on the fourth."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        if host < int(times or 1):
            return int(count)
        host -= int(times or 1)
    return None


def number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable's whole number; MAX of MIN:MAX; of a JSON list, how many it has; None where it is not set, or is
    something else."""
    word = environment.get(name, "").strip()
    if word.startswith("["):
        return word.count(",") + 1
    word = word.rpartition(":")[2]
    return int(word) if word.isascii() and word.isdecimal() else None
