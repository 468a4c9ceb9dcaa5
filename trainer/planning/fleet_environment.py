"""``launch.env=paddle``: reads role, rank and endpoints from the environment variables of Paddle Fleet's launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.planning.endpoints import endpoints_of

ENV = "launch.env=paddle"
ROLE = "TRAINING_ROLE"
SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
WORKERS = "PADDLE_TRAINER_ENDPOINTS"
NUMBER = "PADDLE_TRAINERS_NUM"
ID = "PADDLE_TRAINER_ID"
CURRENT = "PADDLE_CURRENT_ENDPOINT"
IP, PORT = "POD_IP", "PADDLE_PORT"
EXAMPLES = {
    SERVERS: "10.0.0.1:8000,10.0.0.2:8000",
    WORKERS: "10.0.0.1:8100,10.0.0.2:8100",
    NUMBER: "2",
    ID: "0",
    IP: "10.0.0.1",
    PORT: "8000",
    ROLE: "TRAINER",
}
ROLES = {"PSERVER": "server", "TRAINER": "worker"}


def of_paddle(launch: LaunchConfig, environment: Mapping[str, str], mode: str) -> dict[str, Any]:
    """The keys of ``launch`` that Paddle Fleet's environment variables set.

    Args:
        launch: without role and endpoints of its own.
        mode: where nothing is trained, there are no servers.

    Raises:
        UserError: a variable is missing, or two contradict each other.
    """
    told = {name: value.strip() for name, value in environment.items() if value.strip()}
    if SERVERS in told:
        _needed(told, ROLE)
    role = told.get(ROLE, "TRAINER").upper()
    if role not in ROLES:
        raise UserError(f"{ROLE}={told[ROLE]}", f"is neither PSERVER nor TRAINER ({ENV})", f"{ROLE}=TRAINER")
    workers = endpoints_of(WORKERS, _needed(told, WORKERS), EXAMPLES[WORKERS])
    if (number := _number(told, NUMBER, str(len(workers)))) != len(workers):
        raise UserError(f"{NUMBER}={number}", f"{WORKERS} has {len(workers)}", f"{NUMBER}={len(workers)}")
    servers = told.get(SERVERS) if mode == "train" else None
    rank = _rank_of_a_server(told) if ROLES[role] == "server" else _rank_of_a_worker(told)
    return {"role": ROLES[role], "rank": rank, "server_endpoints": servers, "worker_endpoints": told[WORKERS]}


def _rank_of_a_server(told: Mapping[str, str]) -> int:
    """A server's rank is the place of its own endpoint in the list."""
    servers = endpoints_of(SERVERS, _needed(told, SERVERS), EXAMPLES[SERVERS])
    host, port = _needed(told, IP), _number(told, PORT)
    mine = [rank for rank, server in enumerate(servers) if (server.host, server.port) == (host.strip("[]"), port)]
    if not mine:
        raise UserError(
            f"{IP}={host} {PORT}={port}",
            f"is no endpoint of {SERVERS}={told[SERVERS]}",
            f"{IP}={servers[0].host} {PORT}={servers[0].port}",
        )
    return mine[0]


def _rank_of_a_worker(told: Mapping[str, str]) -> int:
    workers = endpoints_of(WORKERS, told[WORKERS], EXAMPLES[WORKERS])
    rank = _number(told, ID)
    if rank >= len(workers):
        raise UserError(
            f"{ID}={rank}",
            f"{WORKERS} has {len(workers)}, so that the last is {len(workers) - 1}",
            f"{ID}={len(workers) - 1}",
        )
    mine = told.get(CURRENT, str(workers[rank]))
    if endpoints_of(CURRENT, mine) != (workers[rank],):
        raise UserError(
            f"{CURRENT}={mine}",
            f"{ID}={rank}, and that one of {WORKERS} is {workers[rank]}",
            f"{CURRENT}={workers[rank]}",
        )
    return rank


def _needed(told: Mapping[str, str], name: str) -> str:
    if name not in told:
        why = {WORKERS: ": trainer 0's endpoint is where all processes meet"}.get(name, "")
        raise UserError(name, f"is not set, and {ENV} needs it{why}", f"{name}={EXAMPLES[name]}")
    return told[name]


def _number(told: Mapping[str, str], name: str, default: str = "") -> int:
    value = told.get(name, default) or _needed(told, name)
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"{name}={value}", f"is no whole number ({ENV})", f"{name}={EXAMPLES[name]}")
    return int(value)
