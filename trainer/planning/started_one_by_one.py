"""Runs whose processes are started one by one: each command is one server or worker and knows all endpoints.

Such a process is a host with one process on it. The hosts are numbered by the workers' ranks, and the servers follow:
host 0 is worker 0, at whose endpoint all meet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.host import addresses, torchrun
from trainer.planning.endpoints import Endpoint, endpoints_of
from trainer.planning.fleet_environment import of_paddle
from trainer.wording import counted

ROLE, RANK = "launch.role", "launch.rank"
SERVERS, WORKERS = "launch.server_endpoints", "launch.worker_endpoints"
OF_ROLES = ("rank", "server_endpoints", "worker_endpoints")
OF_HOSTS = ("ips", "nnodes", "node_rank", "nproc", "master_addr", "master_port", "server_hosts", "server_ports")
"""Keys that say the same in another way."""


@dataclass(frozen=True)
class Peer:
    """One process of a run whose processes are started one by one: its role, rank and endpoint."""

    role: str
    rank: int
    endpoint: Endpoint

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


def peers(launch: LaunchConfig) -> list[Peer]:
    """All processes of a run whose processes are started one by one, in the order of host numbers; else []."""
    if launch.role is None:
        return []
    listed = {
        "worker": endpoints_of(WORKERS, launch.worker_endpoints),
        "server": endpoints_of(SERVERS, launch.server_endpoints),
    }
    return [Peer(role, rank, endpoint) for role, all_of in listed.items() for rank, endpoint in enumerate(all_of)]


def on_roles(config: RunConfig, environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Return the config with hosts filled in from its endpoints, if processes are started one by one; else unchanged.

    Raises:
        UserError: role, rank and endpoints do not fit together, or not to this machine.
    """
    if config.launch.env == "paddle":
        config = config.changed(launch=of_paddle(_without_a_role(config.launch), environment, config.mode))
    launch = config.launch
    if launch.role is None:
        _check_no_role(launch)
        return config
    if torchrun.is_rank(environment):
        raise UserError(
            f"{ROLE}={launch.role}", "torchrun has started the processes already", "the command without torchrun"
        )
    if launch.role == "server" and config.mode != "train":
        raise UserError(f"{ROLE}=server", f"mode={config.mode} has no servers", f"{ROLE}=worker")
    everybody, me = peers(launch), _me(launch)
    _check_apart(launch, everybody)
    _check_others(launch, everybody)
    if not config.plan:
        _check_here(me, len(everybody))
    first = everybody[0].endpoint
    workers = sum(peer.role == "worker" for peer in everybody)
    return config.changed(
        launch={
            "nnodes": len(everybody),
            "node_rank": everybody.index(me),
            "master_addr": first.host,
            "master_port": first.port,
            "workers": workers,
            "servers": len(everybody) - workers or None,
        }
    )


def _without_a_role(launch: LaunchConfig) -> LaunchConfig:
    """The same, where nothing but the environment tells the role."""
    for name in ("role", *OF_ROLES):
        if (value := getattr(launch, name)) is not None:
            raise UserError(
                f"launch.{name}={value}",
                "with launch.env=paddle the environment tells role, rank and endpoints",
                "launch.env=auto",
            )
    return launch


def _check_no_role(launch: LaunchConfig) -> None:
    for name in OF_ROLES:
        if (value := getattr(launch, name)) is not None:
            raise UserError(
                f"launch.{name}={value}",
                f"is for processes that are started one by one, and {ROLE} is not given",
                f"{ROLE}=worker {RANK}=0",
            )


def _me(launch: LaunchConfig) -> Peer:
    """Which of the run's processes this command is."""
    what = f"{ROLE}={launch.role}"
    key, example = (SERVERS, "8000") if launch.role == "server" else (WORKERS, "8100")
    for needed in (WORKERS, key):
        if getattr(launch, needed.removeprefix("launch.")) is None:
            raise UserError(
                what,
                f"{needed} is not given: all processes know the endpoints of all",
                f"{needed}=10.0.0.1:{example},10.0.0.2:{example}",
            )
    mine = [peer for peer in peers(launch) if peer.role == launch.role]
    if launch.rank is None:
        raise UserError(
            what, f"{RANK} is not given: which of {counted(len(mine), str(launch.role))} is this one", f"{RANK}=0"
        )
    if launch.rank >= len(mine):
        raise UserError(
            f"{RANK}={launch.rank}",
            f"{key} has {counted(len(mine), 'endpoint')}, so that the last rank is {len(mine) - 1}",
            f"{RANK}={len(mine) - 1}",
        )
    return mine[launch.rank]


def _check_apart(launch: LaunchConfig, everybody: list[Peer]) -> None:
    """Each endpoint is one process's, and each leads to the same place from all machines."""
    seen: dict[Endpoint, Peer] = {}
    for peer in everybody:
        if (other := seen.setdefault(peer.endpoint, peer)) != peer:
            raise UserError(
                f"{SERVERS}={launch.server_endpoints}",
                f"{peer.endpoint} is the endpoint of {other} as well",
                "another port",
            )
    at_home = [peer for peer in everybody if peer.endpoint.is_loopback]
    if at_home and len(at_home) < len(everybody):
        away = next(peer for peer in everybody if not peer.endpoint.is_loopback)
        key = WORKERS if at_home[0].role == "worker" else SERVERS
        raise UserError(
            f"{key}={getattr(launch, key.removeprefix('launch.'))}",
            f"{at_home[0].endpoint.host} leads each machine to itself, and {away} is at {away.endpoint}",
            "addresses that all machines can reach",
        )


def _check_others(launch: LaunchConfig, everybody: list[Peer]) -> None:
    """What else is typed does not contradict the endpoints."""
    usual = LaunchConfig()
    for name in OF_HOSTS:
        if (value := getattr(launch, name)) != (instead := getattr(usual, name)):
            word = "null" if instead is None else instead
            raise UserError(
                f"launch.{name}={value}",
                f"with {ROLE} the endpoints say where all processes are",
                f"launch.{name}={word}",
            )
    for role, key, endpoints in (("worker", "workers", WORKERS), ("server", "servers", SERVERS)):
        size = sum(peer.role == role for peer in everybody)
        if (given := getattr(launch, key)) is not None and given != size:
            raise UserError(
                f"launch.{key}={given}",
                f"{endpoints} has {counted(size, 'endpoint')}",
                f"launch.{key}={size or 'null'}",
            )


def _check_here(me: Peer, processes: int) -> None:
    """Refuse an endpoint at which this process cannot listen: a server must, and worker 0 if there are others."""
    key, (host, port) = (SERVERS if me.role == "server" else WORKERS), (me.endpoint.host, me.endpoint.port)
    what = f"{key}={me.endpoint}"
    if not addresses.port_is_free(host, 0):
        raise UserError(
            f"{what} of {me}",
            f"{host} is not an address of this machine (its own is {addresses.address()})",
            f"the command of {me} on its machine, or another {RANK} here",
        )
    listens = me.role == "server" or (me.rank == 0 and processes > 1)
    if listens and not addresses.port_is_free(host, port):
        raise UserError(
            f"{what} of {me}", f"port {port} is in use on {host}", "another port, in the commands of all processes"
        )


def check_strategy(launch: LaunchConfig, strategy: str, roles: Mapping[str, int]) -> None:
    """Refuse a run without server endpoints if its strategy has servers and processes are started one by one."""
    if launch.role is not None and "server" in roles and launch.server_endpoints is None:
        raise UserError(
            f"{ROLE}={launch.role}",
            f"strategy={strategy} has servers, and {SERVERS} is not given",
            f"{SERVERS}=10.0.0.1:8000,10.0.0.2:8000",
        )


def on_one_machine(launch: LaunchConfig) -> bool:
    """Whether all processes of a run, started one by one, are on one machine."""
    everybody = [peer.endpoint for peer in peers(launch)]
    return all(e.is_loopback for e in everybody) or len({e.host for e in everybody}) == 1


def neighbours(launch: LaunchConfig) -> list[Peer]:
    """The workers at this process's address, where processes are started one by one; itself if it is one of them."""
    everybody = peers(launch)
    here = everybody[launch.node_rank].endpoint.host
    return [peer for peer in everybody if peer.role == "worker" and peer.endpoint.host == here]


def plain_launch(launch: LaunchConfig) -> dict[str, Any]:
    """The endpoints as settings, the same for all processes of a run that are started one by one."""
    listed = ((WORKERS, launch.worker_endpoints), (SERVERS, launch.server_endpoints))
    return {key: ",".join(map(str, endpoints_of(key, told))) or None for key, told in listed}
