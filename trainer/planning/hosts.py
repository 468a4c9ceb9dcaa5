"""Decides how many hosts a run has, which of them is this one, where they meet, and which have parameter servers.

Where an engine has started the command once on each host, its variables say which host this one is
(:mod:`trainer.host.engine_tasks`). A command of which each copy would be a whole run by itself is refused: the copies
would train the same into one folder. torchrun's variables are read in :mod:`trainer.launch.torchrun`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.host import addresses, hardware, torchrun
from trainer.host.engine_tasks import (
    JOB_INDEX,
    KUBERNETES,
    PADDLE,
    ROLE,
    SERVER_ENDPOINTS,
    WORKER_ENDPOINTS,
    Task,
    number,
    tasks_of,
)
from trainer.host.first_host import first_host
from trainer.planning.endpoints import MEETING_PORT, PORTS, server_ports
from trainer.planning.launch_role import check_strategy, on_roles, peers
from trainer.wording import counted


def is_elsewhere(config: RunConfig, device: str, nproc: int) -> bool:
    """Whether a plan is for other hosts than this one alone: for several, or for one with more GPUs."""
    return bool(config.plan) and (config.launch.nnodes > 1 or (device == "cuda" and nproc > len(hardware.gpus())))


def on_hosts(config: RunConfig) -> RunConfig:
    """Return the config with its hosts filled in: their number, the first one's address, this one's number, a port.

    Raises:
        UserError: they contradict each other.
    """
    config = on_roles(of_engine(_with_range(config)))
    if config.launch.role is not None:
        return config
    if config.launch.ips:
        config = config.changed(launch=_of_addresses(config.launch, config.plan))
    _check_hosts(config.launch)
    if config.launch.nnodes > 1 and config.launch.master_port == 0:
        config = config.changed(launch={"master_port": MEETING_PORT})
    _check_workers(config.launch)
    return config


def of_engine(config: RunConfig, environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Return the config with the hosts of the engine that has started this command once on each of them.

    What is typed counts: a host's number or address from the environment fills in what is not.

    Raises:
        UserError: ``launch.env`` names an engine that has not started this process, or ``launch.nnodes`` contradicts it.
    """
    launch = config.launch
    if launch.env in ("none", "paddle", None) or launch.role or launch.ips or torchrun.is_rank(environment):
        return config
    if ROLE in environment:
        return config.changed(launch=_of_pod(environment))
    tasks = [task for task in tasks_of(environment) if task.of.engine and launch.env in ("auto", task.of.engine)]
    if launch.env != "auto" and not tasks:
        raise UserError(f"launch.env={launch.env}", "no variable of it is set here", "launch.env=auto")
    task = next((one for one in tasks if _is_one_host(one, launch)), None)
    if task is None or launch.node_rank:
        return config
    hosts = task.hosts or launch.nnodes
    if launch.nnodes not in (1, hosts):
        what, why = f"launch.nnodes={launch.nnodes}", f"{task.of.launcher} has started {counted(hosts, 'task')}"
        raise UserError(what, f"{why}, one on each host", f"launch.nnodes={hosts}")
    address, port = launch.master_addr, launch.master_port
    if address == schema.LaunchConfig.master_addr:
        address = task.address or first_host(task.of.engine, task.host, environment)
    if not address:
        raise UserError("launch.master_addr", f"{task.of.launcher} does not say where host 0 is", "launch.master_addr=ADDRESS")
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


def _is_one_host(task: Task, launch: schema.LaunchConfig) -> bool:
    """Whether the task is the launcher of one of several hosts; where nothing says how many, ``launch.nnodes`` does."""
    if task.size is None:
        return task.of.engine == KUBERNETES and launch.nnodes > 1
    return task.is_host and task.size > 1


def _with_range(config: RunConfig) -> RunConfig:
    """Return the config with ``launch.nnodes=MIN:MAX`` as two numbers: planned for MAX hosts, it goes on with MIN."""
    if not isinstance(config.launch.nnodes, str):
        return config
    least, most = map(int, config.launch.nnodes.split(":"))
    return config.changed(launch={"nnodes": most, "least_nnodes": least})


def _of_addresses(launch: schema.LaunchConfig, plan_alone: bool) -> dict[str, Any]:
    """launch.ips says how many hosts there are, which is the first, and which is this one."""
    if not (hosts := hosts_of(launch)):
        raise UserError(f"launch.ips={launch.ips}", "holds no address", "launch.ips=10.0.0.1,10.0.0.2")
    here = [i for i, ip in enumerate(hosts) if addresses.port_is_free(ip, 0)]
    if not here and not plan_alone:
        own = addresses.address()
        raise UserError(
            f"launch.ips={launch.ips}",
            f"none of these addresses is this host's (its own is {own})",
            f"this command on those hosts, or launch.ips with {own} among its addresses, the same on all hosts",
        )
    return {"nnodes": len(hosts), "master_addr": hosts[0], "node_rank": here[0] if here else 0}


def _check_hosts(launch: schema.LaunchConfig) -> None:
    nnodes = launch.nnodes
    if launch.node_rank >= nnodes:
        raise UserError(
            f"launch.node_rank={launch.node_rank}",
            f"with launch.nnodes={nnodes} it must be below {nnodes}",
            "launch.node_rank=0",
        )


def _check_workers(launch: schema.LaunchConfig) -> None:
    """launch.workers can be spread evenly over the hosts, and launch.nproc agrees with it."""
    nnodes, nproc, workers = launch.nnodes, launch.nproc, launch.workers
    if workers is None:
        return
    what = f"launch.workers={workers}"
    if workers < nnodes and not launch.ips:
        raise UserError(what, f"is not one for each of {nnodes} hosts", f"launch.nnodes={workers}")
    if workers % nnodes:
        raise UserError(
            what,
            f"cannot be spread evenly over {nnodes} hosts",
            f"launch.workers={max(nnodes, workers // nnodes * nnodes)}",
        )
    if nproc is not None and nproc * nnodes != workers:
        raise UserError(
            f"launch.nproc={nproc}",
            f"on {counted(nnodes, 'host')} disagrees with {what}",
            f"launch.nproc={workers // nnodes}",
        )


def hosts_of(launch: schema.LaunchConfig) -> list[str]:
    """The addresses of the hosts in ``launch.ips``, without brackets around IPv6; [] if it is not set."""
    return [ip for word in str(launch.ips or "").split(",") if (ip := word.strip(" []"))]


AUTO, ALL, FIRST = "auto", "all", "first"
SERVER_HOSTS = "launch.server_hosts"


def server_hosts(launch: LaunchConfig, servers: int) -> list[int]:
    """The host number of each parameter server, by server number; servers of one host have consecutive numbers.

    The servers are spread evenly over the chosen hosts; where the division leaves a rest, the first hosts have one
    more.

    Raises:
        UserError: there is no such host, a host would have no server, or the text names no hosts.
    """
    hosts = _chosen(launch, servers)
    if len(hosts) > servers:
        what, least = f"{SERVER_HOSTS}={launch.server_hosts}", len(hosts)
        why = f"{counted(servers, 'server')} cannot be on {counted(least, 'host')}: some would have none"
        raise UserError(what, why, f"launch.servers={least} (or {SERVER_HOSTS}=first)")
    each, rest = divmod(servers, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < rest))]


def _chosen(launch: LaunchConfig, servers: int) -> list[int]:
    text, everywhere = launch.server_hosts.strip(), list(range(launch.nnodes))
    if text == AUTO:
        return everywhere if servers >= launch.nnodes else [0]
    return {ALL: everywhere, FIRST: [0]}.get(text) or _numbers(text, launch.nnodes)


def _numbers(text: str, nnodes: int) -> list[int]:
    """The hosts of a list such as ``0,2``."""
    what, instead = f"{SERVER_HOSTS}={text}", f"{SERVER_HOSTS}=auto (or all, first, or hosts' numbers such as 0,1)"
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(what, "names no host", instead)
    hosts: list[int] = []
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise UserError(what, f"{word} is no host's number, and neither auto, all nor first", instead)
        if (host := int(word)) >= nnodes:
            last = f"the last of {nnodes} is host {nnodes - 1}" if nnodes > 1 else "the run has host 0 alone"
            raise UserError(what, f"there is no host {word}: {last} (launch.nnodes, launch.ips)", instead)
        if host in hosts:
            raise UserError(
                what, f"names host {host} twice", f"{SERVER_HOSTS}={','.join(map(str, dict.fromkeys(map(int, words))))}"
            )
        hosts.append(host)
    return hosts


def listens_at(launch: schema.LaunchConfig) -> str:
    """The address where this host's parameter servers listen: its own in launch.ips, else the one by which host 0
    reaches it."""
    if everybody := peers(launch):
        return addresses.own(everybody[launch.node_rank].endpoint.host)
    if launch.nnodes == 1:
        return addresses.LOOPBACK
    if hosts := hosts_of(launch):
        return addresses.own(hosts[launch.node_rank])
    if launch.node_rank == 0:
        return addresses.own(launch.master_addr)
    return addresses.address_towards(launch.master_addr) or addresses.address()


def check_servers(config: RunConfig, strategy: str, roles: Mapping[str, int]) -> None:
    """Refuse parameter servers on hosts that do not exist, or at ports that are invalid or in use."""
    check_strategy(config.launch, strategy, roles)
    if servers := roles.get("server"):
        server_hosts(config.launch, servers)
        _check_server_ports(config, servers)


def _check_server_ports(config: RunConfig, servers: int) -> None:
    """Refuse server ports that are invalid, or in use where one of this host's servers must listen."""
    launch = config.launch
    ports = server_ports(launch.server_ports, servers)
    if not ports or config.plan:
        return
    host, what = listens_at(launch), f"{PORTS}={launch.server_ports}"
    nodes = server_hosts(launch, servers)
    for port in (port for port, node in zip(ports, nodes, strict=True) if node == launch.node_rank):
        meets = launch.nnodes > 1 and launch.node_rank == 0 and port == launch.master_port
        if meets or not addresses.port_is_free(host, port):
            why = "launch.master_port, where the hosts meet" if meets else f"in use on {host}"
            raise UserError(what, f"port {port} is {why}", f"{PORTS}={port + 1}-{port + servers}")


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


def _refused(task: Task, environment: Mapping[str, str], nnodes: int) -> UserError:
    one, size = task.of, task.size
    names = dict.fromkeys(name for name in (one.size, one.rank) if name in environment)
    what = " ".join(f"{name}={environment[name]}" for name in names)
    tasks = f"{size} {'processes' if one.of_processes else 'tasks'} of one job" if size else "several tasks of one job"
    each = "this command would be a whole run by itself in each of them"
    if nnodes > 1:
        each = f"launch.nnodes={nnodes} is for one command on each host"
    return UserError(what, f"{one.launcher} starts {tasks}, and {each}", _instead(task))


def _instead(task: Task) -> str:
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
