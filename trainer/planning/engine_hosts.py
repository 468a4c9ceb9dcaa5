"""Reads from an engine's variables which host this command is, and refuses copies of one run.

Where an engine (srun, mpirun, Kubernetes) has started the command once on each host, its variables say which host this
one is (:mod:`trainer.host.engine_tasks`). If each of several tasks would be a whole run by itself, the command is
refused: the copies would train the same into one folder. torchrun's variables are read in
:mod:`trainer.launch.torchrun`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import torchrun
from trainer.host.engine_tasks import (
    JOB_INDEX,
    KUBERNETES,
    PADDLE,
    ROLE,
    SERVER_ENDPOINTS,
    WORKER_ENDPOINTS,
    EngineTask,
    joined_tasks,
    number,
    tasks_of,
)
from trainer.wording import counted


def of_engine(config: RunConfig, environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Return the config with the hosts of the engine that has started this command once on each of them.

    What is typed counts: a host's number or address from the environment fills in what is not.

    Raises:
        UserError: ``launch.env`` names an engine that has not started this process, or ``launch.nnodes`` differs.
    """
    launch = config.launch
    if launch.env in ("none", "paddle", None) or launch.role or launch.ips or torchrun.is_rank(environment):
        return config
    if ROLE in environment:
        return config.changed(launch=_of_pod(environment))
    tasks = joined_tasks(environment, launch.env)
    if launch.env != "auto" and not tasks:
        raise UserError(f"launch.env={launch.env}", "no variable of it is set here", "launch.env=auto")
    task = next((one for one in tasks if _is_one_host(one, launch)), None)
    if task is None or launch.node_rank:
        return config
    if isinstance(launch.nnodes, str):
        raise UserError(
            f"launch.nnodes={launch.nnodes}", f"{task.of.launcher} starts a fixed number of hosts", "launch.env=none"
        )
    hosts = task.hosts or launch.nnodes
    if launch.nnodes not in (1, hosts):
        what, why = f"launch.nnodes={launch.nnodes}", f"{task.of.launcher} has started {counted(hosts, 'task')}"
        raise UserError(what, f"{why}, one on each host", f"launch.nnodes={hosts}")
    from trainer.host.first_host import first_host

    address, port = launch.master_addr, launch.master_port
    if address == schema.LaunchConfig.master_addr:
        address = task.address or first_host(task.of.engine, task.host, environment)
    if not address:
        raise UserError(
            "launch.master_addr", f"{task.of.launcher} does not say where host 0 is", "launch.master_addr=ADDRESS"
        )
    found = {"nnodes": hosts, "node_rank": task.host, "master_addr": address, "master_port": port or task.port}
    if launch.nproc is None and launch.workers is None and task.processes:
        found["nproc"] = task.processes
    return config.changed(launch=found)


def _of_pod(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a pod that is one process of a run with servers (:mod:`trainer.launch.engines.kubernetes`)."""
    return {
        "role": environment[ROLE],
        "rank": number(environment, JOB_INDEX.rank),
        "server_endpoints": environment[SERVER_ENDPOINTS],
        "worker_endpoints": environment[WORKER_ENDPOINTS],
    }


def _is_one_host(task: EngineTask, launch: schema.LaunchConfig) -> bool:
    """Whether the task is the launcher of one of several hosts; where nothing says how many, ``launch.nnodes`` does."""
    if task.size is None:
        return task.of.engine == KUBERNETES and launch.nnodes != 1
    return task.is_host and task.size > 1


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
    for task in tasks_of(environment):
        one, size = task.of, task.size
        if (one.both and one.rank not in environment) or (launch.nnodes > 1 and one.first):
            continue
        if launch.nnodes > 1 and one.of_processes:
            size = None
        if (size or task.rank + 1) > launch.nnodes:
            raise _refused(task, environment, launch.nnodes)


def _refused(task: EngineTask, environment: Mapping[str, str], nnodes: int) -> UserError:
    one, size = task.of, task.size
    names = dict.fromkeys(name for name in (one.size, one.rank) if name in environment)
    what = " ".join(f"{name}={environment[name]}" for name in names)
    tasks = f"{size} {'processes' if one.of_processes else 'tasks'} of one job" if size else "several tasks of one job"
    each = "this command would be a whole run by itself in each of them"
    if nnodes > 1:
        each = f"launch.nnodes={nnodes} is for one command on each host"
    return UserError(what, f"{one.launcher} starts {tasks}, and {each}", _instead(task))


def _instead(task: EngineTask) -> str:
    """What to type: the command once on one host, or once on each of several."""
    one, size, hosts = task.of, task.size, task.hosts
    own = "launch.env=none if each task is a run of its own"
    if one is PADDLE:
        return f"launch.env=paddle; or {own}"
    number = f"'launch.node_rank=${{oc.env:{one.host}}}'" if one.host else "launch.node_rank=N"
    each = f"on each host one command with launch.nnodes={hosts or 'HOSTS'} {number} launch.master_addr=ADDRESS"
    if not one.once:
        return f"{each}; or {own}"
    once = f"{one.once} python -m trainer ... launch.nproc={size or 'WORKERS'}"
    if hosts == 1:
        return f"{once}; or {own}"
    return f"{each}; or {own}" if hosts else f"{once}; or {each}; or {own}"
