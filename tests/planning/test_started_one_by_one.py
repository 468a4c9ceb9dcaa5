"""Processes that are started one by one: who is who, by keys or by Fleet's environment, and what is refused."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from trainer.config import redact
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.planning.endpoints import server_ports
from trainer.planning.launch_role import on_roles
from trainer.planning.run_secret import check_secret, secret_of_hosts

HERE = "127.0.0.1:18101,127.0.0.1:18102"
SERVERS = "127.0.0.1:18001,127.0.0.1:18002"
PADDLE = {"PADDLE_PSERVERS_IP_PORT_LIST": SERVERS, "PADDLE_TRAINER_ENDPOINTS": HERE, "PADDLE_TRAINERS_NUM": "2"}
WORKER = {**PADDLE, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}
SERVER = {**PADDLE, "TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": "18002"}
COLLECTIVE = {
    "PADDLE_TRAINER_ENDPOINTS": HERE,
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "0",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:18101",
}


def launched(environment: dict[str, str] | None = None, plan: bool = False, **launch: object) -> LaunchConfig:
    return on_roles(RunConfig(plan=plan).changed(launch=launch), environment or {}).launch


def test_workers_are_the_first_hosts_and_all_meet_at_the_first_one() -> None:
    told = launched(role="server", rank=1, server_endpoints=SERVERS, worker_endpoints=HERE)
    assert (told.nnodes, told.node_rank, told.workers, told.servers) == (4, 3, 2, 2)
    assert (told.master_addr, told.master_port) == ("127.0.0.1", 18101)
    assert launched(role="worker", rank=1, server_endpoints=SERVERS, worker_endpoints=HERE).node_rank == 1


@pytest.mark.parametrize(
    ("environment", "role", "rank"), [(WORKER, "worker", 1), (SERVER, "server", 1), (COLLECTIVE, "worker", 0)]
)
def test_fleets_environment_is_the_same_as_the_keys(environment: dict[str, str], role: str, rank: int) -> None:
    told = launched(environment, env="paddle")
    servers = environment.get("PADDLE_PSERVERS_IP_PORT_LIST")
    by_keys = launched(role=role, rank=rank, server_endpoints=servers, worker_endpoints=HERE)
    assert (told.role, told.rank, told.nnodes, told.node_rank) == (role, rank, by_keys.nnodes, by_keys.node_rank)
    assert (told.server_endpoints, told.worker_endpoints) == (servers, HERE)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "PADDLE_TRAINER_ENDPOINTS: is not set"),
        ({**WORKER, "TRAINING_ROLE": ""}, "TRAINING_ROLE: is not set"),
        ({**WORKER, "TRAINING_ROLE": "HETER_TRAINER"}, "TRAINING_ROLE=HETER_TRAINER: is neither PSERVER nor TRAINER"),
        ({**WORKER, "PADDLE_TRAINER_ID": ""}, "PADDLE_TRAINER_ID: is not set"),
        ({**WORKER, "PADDLE_TRAINER_ID": "one"}, "PADDLE_TRAINER_ID=one: is no whole number"),
        ({**WORKER, "PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID=2: PADDLE_TRAINER_ENDPOINTS has 2"),
        ({**WORKER, "PADDLE_TRAINERS_NUM": "3"}, "PADDLE_TRAINERS_NUM=3: PADDLE_TRAINER_ENDPOINTS has 2"),
        ({**SERVER, "POD_IP": ""}, "POD_IP: is not set"),
        ({**SERVER, "PADDLE_PORT": ""}, "PADDLE_PORT: is not set"),
        (
            {**SERVER, "PADDLE_PORT": "9"},
            "POD_IP=127.0.0.1 PADDLE_PORT=9: is no endpoint of PADDLE_PSERVERS_IP_PORT_LIST",
        ),
        ({**SERVER, "PADDLE_PSERVERS_IP_PORT_LIST": ""}, "PADDLE_PSERVERS_IP_PORT_LIST: is not set"),
        (
            {**COLLECTIVE, "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:1"},
            "PADDLE_CURRENT_ENDPOINT=127.0.0.1:1: PADDLE_TRAINER_ID=0",
        ),
    ],
)
def test_missing_and_contradictory_variables_are_named(environment: dict[str, str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        launched(environment, env="paddle")
    assert str(refused.value).startswith(says)


BOTH = {"server_endpoints": SERVERS, "worker_endpoints": HERE}


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"rank": 1}, "launch.rank=1: is for processes that are started one by one"),
        ({"role": "worker"}, "launch.role=worker: launch.worker_endpoints is not given"),
        ({"role": "server", "worker_endpoints": HERE}, "launch.role=server: launch.server_endpoints is not given"),
        ({"role": "worker", **BOTH}, "launch.role=worker: launch.rank is not given"),
        ({"role": "worker", "rank": 2, **BOTH}, "launch.rank=2: launch.worker_endpoints has 2 endpoints"),
        (
            {"role": "worker", "rank": 0, "worker_endpoints": "here"},
            "launch.worker_endpoints=here: is no address with a port",
        ),
        ({"role": "worker", "rank": 0, "worker_endpoints": "a:0"}, "launch.worker_endpoints=a:0: 0 is no port"),
        (
            {"role": "worker", "rank": 0, "worker_endpoints": "0.0.0.0:80"},
            "launch.worker_endpoints=0.0.0.0:80: 0.0.0.0 is no address",
        ),
        (
            {"role": "worker", "rank": 0, "worker_endpoints": "::1:80"},
            "launch.worker_endpoints=::1:80: is no address with a port",
        ),
        (
            {"role": "worker", "rank": 0, "worker_endpoints": "a:1,a:1"},
            "launch.worker_endpoints=a:1,a:1: a:1 stands there twice",
        ),
        (
            {"role": "worker", "rank": 0, **BOTH, "server_endpoints": HERE},
            f"launch.server_endpoints={HERE}: 127.0.0.1:18101 is the endpoint of worker 0",
        ),
        (
            {"role": "worker", "rank": 0, **BOTH, "server_endpoints": "10.0.0.9:1"},
            f"launch.worker_endpoints={HERE}: 127.0.0.1 leads each machine to itself",
        ),
        (
            {"role": "worker", "rank": 0, "worker_endpoints": "240.0.0.1:80"},
            "launch.worker_endpoints=240.0.0.1:80 of worker 0: 240.0.0.1 is not an address of this machine",
        ),
        (
            {"role": "worker", "rank": 0, **BOTH, "workers": 3},
            "launch.workers=3: launch.worker_endpoints has 2 endpoints",
        ),
        (
            {"role": "worker", "rank": 0, **BOTH, "servers": 1},
            "launch.servers=1: launch.server_endpoints has 2 endpoints",
        ),
        ({"role": "worker", "rank": 0, **BOTH, "nproc": 2}, "launch.nproc=2: with launch.role the endpoints say"),
        ({"role": "worker", "rank": 0, **BOTH, "ips": "a,b"}, "launch.ips=a,b: with launch.role the endpoints say"),
        ({"env": "paddle", "role": "worker"}, "launch.role=worker: with launch.env=paddle the environment tells"),
    ],
)
def test_endpoints_that_do_not_fit_are_refused(launch: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refused:
        launched(**launch)
    assert str(refused.value).startswith(says)


def test_port_in_use_is_refused_for_those_who_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mine = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=r"of server 0: port \d+ is in use on 127\.0\.0\.1"):
            launched(role="server", rank=0, server_endpoints=mine, worker_endpoints=HERE)
        with pytest.raises(UserError, match=r"of worker 0: port \d+ is in use"):
            launched(role="worker", rank=0, worker_endpoints=f"{mine},{HERE}")
        assert launched(role="worker", rank=1, worker_endpoints=f"127.0.0.1:18103,{mine}").node_rank == 1
        assert launched(plan=True, role="worker", rank=0, worker_endpoints="240.0.0.1:80,240.0.0.2:80").nnodes == 2


def test_secret_of_one_machine_is_kept_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINER_RUN_SECRET", raising=False)
    mine = launched(role="worker", rank=0, **BOTH)
    with redact.HERE.for_now():
        first, again = secret_of_hosts(mine), secret_of_hosts(mine)
        assert first == again and len(first) >= 32
        kept = tmp_path / "cache" / "run.secret"
        assert stat.S_IMODE(os.stat(kept).st_mode) == 0o600
        assert os.listdir(kept.parent) == ["run.secret"]
        kept.chmod(0o644)
        with pytest.raises(UserError, match="can be read or written by other users"):
            secret_of_hosts(mine)
    check_secret(RunConfig().changed(launch=vars(mine)), {"server": 2, "worker": 2})
    away = {"server_endpoints": "10.0.0.1:1", "worker_endpoints": "10.0.0.2:1"}
    spread = RunConfig().changed(launch=vars(launched(plan=True, role="worker", rank=0, **away)))
    with pytest.raises(
        UserError,
        match=r"launch\.role=worker: parameter servers and workers of several hosts know each other by a secret",
    ):
        check_secret(spread, {"server": 1, "worker": 1})


def test_ports_of_servers() -> None:
    assert server_ports("8000-8003", 3) == [8000, 8001, 8002]
    assert server_ports("8000,9000-9001", 3) == [8000, 9000, 9001]
    assert server_ports(None, 3) == []
    for told, says in (
        ("8000", "is 1 for 2 servers"),
        ("8001-8000", "neither a port"),
        ("8000,8000", "twice"),
        ("0", "neither"),
        ("8000-70000", "neither"),
        ("a", "a is neither"),
    ):
        with pytest.raises(UserError, match=says):
            server_ports(told, 2)
