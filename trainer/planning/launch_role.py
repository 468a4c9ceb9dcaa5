"""Runs whose processes are started one by one (``launch.role``): each command is one server or worker and knows all
endpoints, from the config or from the environment variables of Paddle Fleet's launchers (``launch.env=paddle``).

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
from trainer.wording import counted

ENV = "launch.env=paddle"
PADDLE_ROLE = "TRAINING_ROLE"
PADDLE_SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
PADDLE_WORKERS = "PADDLE_TRAINER_ENDPOINTS"
PADDLE_NUMBER = "PADDLE_TRAINERS_NUM"
PADDLE_ID = "PADDLE_TRAINER_ID"
PADDLE_CURRENT = "PADDLE_CURRENT_ENDPOINT"
PADDLE_IP, PADDLE_PORT = "POD_IP", "PADDLE_PORT"
PADDLE_EXAMPLES = {
    PADDLE_SERVERS: "10.0.0.1:8000,10.0.0.2:8000",
    PADDLE_WORKERS: "10.0.0.1:8100,10.0.0.2:8100",
    PADDLE_NUMBER: "2",
    PADDLE_ID: "0",
    PADDLE_IP: "10.0.0.1",
    PADDLE_PORT: "8000",
    PADDLE_ROLE: "TRAINER",
}
PADDLE_ROLES = {"PSERVER": "server", "TRAINER": "worker"}


def of_paddle(launch: LaunchConfig, environment: Mapping[str, str], mode: str) -> dict[str, Any]:
    """The keys of ``launch`` that Paddle Fleet's environment variables set.

    Args:
        launch: without role and endpoints of its own.
        mode: where nothing is trained, there are no servers.

    Raises:
        UserError: a variable is missing, or two contradict each other.
    """
    variables = {name: value.strip() for name, value in environment.items() if value.strip()}
    if PADDLE_SERVERS in variables:
        _needed(variables, PADDLE_ROLE)
    role = variables.get(PADDLE_ROLE, "TRAINER").upper()
    if role not in PADDLE_ROLES:
        raise UserError(
            f"{PADDLE_ROLE}={variables[PADDLE_ROLE]}",
            f"is neither PSERVER nor TRAINER ({ENV})",
            f"{PADDLE_ROLE}=TRAINER",
        )
    workers = endpoints_of(PADDLE_WORKERS, _needed(variables, PADDLE_WORKERS), PADDLE_EXAMPLES[PADDLE_WORKERS])
    if (number := _number(variables, PADDLE_NUMBER, str(len(workers)))) != len(workers):
        raise UserError(
            f"{PADDLE_NUMBER}={number}", f"{PADDLE_WORKERS} has {len(workers)}", f"{PADDLE_NUMBER}={len(workers)}"
        )
    servers = variables.get(PADDLE_SERVERS) if mode == "train" else None
    rank = _rank_of_a_server(variables) if PADDLE_ROLES[role] == "server" else _rank_of_a_worker(variables)
    return {
        "role": PADDLE_ROLES[role],
        "rank": rank,
        "server_endpoints": servers,
        "worker_endpoints": variables[PADDLE_WORKERS],
    }


def _rank_of_a_server(variables: Mapping[str, str]) -> int:
    """A server's rank is the place of its own endpoint in the list."""
    servers = endpoints_of(PADDLE_SERVERS, _needed(variables, PADDLE_SERVERS), PADDLE_EXAMPLES[PADDLE_SERVERS])
    host, port = _needed(variables, PADDLE_IP), _number(variables, PADDLE_PORT)
    ranks = [rank for rank, server in enumerate(servers) if (server.host, server.port) == (host.strip("[]"), port)]
    if not ranks:
        raise UserError(
            f"{PADDLE_IP}={host} {PADDLE_PORT}={port}",
            f"is no endpoint of {PADDLE_SERVERS}={variables[PADDLE_SERVERS]}",
            f"{PADDLE_IP}={servers[0].host} {PADDLE_PORT}={servers[0].port}",
        )
    return ranks[0]


def _rank_of_a_worker(variables: Mapping[str, str]) -> int:
    workers = endpoints_of(PADDLE_WORKERS, variables[PADDLE_WORKERS], PADDLE_EXAMPLES[PADDLE_WORKERS])
    rank = _number(variables, PADDLE_ID)
    if rank >= len(workers):
        raise UserError(
            f"{PADDLE_ID}={rank}",
            f"{PADDLE_WORKERS} has {len(workers)}, so that the last is {len(workers) - 1}",
            f"{PADDLE_ID}={len(workers) - 1}",
        )
    current = variables.get(PADDLE_CURRENT, str(workers[rank]))
    if endpoints_of(PADDLE_CURRENT, current) != (workers[rank],):
        raise UserError(
            f"{PADDLE_CURRENT}={current}",
            f"{PADDLE_ID}={rank}, and that one of {PADDLE_WORKERS} is {workers[rank]}",
            f"{PADDLE_CURRENT}={workers[rank]}",
        )
    return rank


def _needed(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        why = {PADDLE_WORKERS: ": trainer 0's endpoint is where all processes meet"}.get(name, "")
        raise UserError(name, f"is not set, and {ENV} needs it{why}", f"{name}={PADDLE_EXAMPLES[name]}")
    return variables[name]


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    value = variables.get(name, default) or _needed(variables, name)
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"{name}={value}", f"is no whole number ({ENV})", f"{name}={PADDLE_EXAMPLES[name]}")
    return int(value)


ROLE, RANK = "launch.role", "launch.rank"
SERVERS, WORKERS = "launch.server_endpoints", "launch.worker_endpoints"
OF_ROLES = ("rank", "server_endpoints", "worker_endpoints")
OF_HOSTS = (
    "address",
    "ips",
    "nnodes",
    "node_rank",
    "nproc",
    "master_addr",
    "master_port",
    "server_hosts",
    "server_ports",
)
"""Other keys for what the endpoints say."""


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
    """Return the config with hosts from its endpoints, if processes are started one by one; else unchanged.

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
            f"{ROLE}={launch.role}",
            f"{torchrun.starter_of()} has started the processes already",
            f"the command without {torchrun.starter_of()}",
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
    """Return ``launch``, after a check that only the environment sets the role, rank and endpoints."""
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
    of_role = [peer for peer in peers(launch) if peer.role == launch.role]
    if launch.rank is None:
        raise UserError(
            what, f"{RANK} is not given: which of {counted(len(of_role), str(launch.role))} is this one", f"{RANK}=0"
        )
    if launch.rank >= len(of_role):
        raise UserError(
            f"{RANK}={launch.rank}",
            f"{key} has {counted(len(of_role), 'endpoint')}, so that the last rank is {len(of_role) - 1}",
            f"{RANK}={len(of_role) - 1}",
        )
    return of_role[launch.rank]


def _check_apart(launch: LaunchConfig, everybody: list[Peer]) -> None:
    """Refuse two processes at one endpoint, and loopback endpoints beside others."""
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
    """Refuse keys that contradict the endpoints."""
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
        if (value := getattr(launch, key)) is not None and value != size:
            raise UserError(
                f"launch.{key}={value}",
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
    return {key: ",".join(map(str, endpoints_of(key, text))) or None for key, text in listed}
