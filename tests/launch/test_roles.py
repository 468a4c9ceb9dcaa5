"""Each process by its own command, for real: the results of the ordinary launch, whoever comes first, dies or never
comes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.pace import wait_for
from tests.ports import ports
from tests.runs import environment, read, trainer, zygote
from tests.zygote import Started
from trainer.errors import RunFailed
from trainer.launch.in_process import alone
from trainer.launch.process_reports import VARIABLES
from trainer.launch.process_reports import environment as environment_of_this_process
from trainer.strategies.pserver.protocol.sockets import ServerSocket

DIGITS = (
    "+recipe=digits_lenet",
    "tracking=none",
    "execution.threads=1",
    "precision=fp64",
    "max_steps=12",
    "device=cpu",
    "data.global_batch_size=64",
)
LONG = ("max_steps=null", "epochs=100000", "execution.val_every=0", "limit_train_batches=20")
PATIENCE_S = 600

pytestmark = pytest.mark.timeout(900)


@dataclass
class Commands:
    """The commands of one run, all in one folder unless they are told another."""

    folder: Path
    workers: list[str]
    servers: list[str]
    started: dict[str, Started] = field(default_factory=dict)

    def start(self, who: str, *argv: str, keys: bool = True, **variables: str) -> None:
        """``worker 0``, ...; ``keys``: the command tells its role itself."""
        role, rank = who.split()
        own = (f"launch.role={role}", f"launch.rank={rank}", f"launch.worker_endpoints={','.join(self.workers)}")
        own += (f"launch.server_endpoints={','.join(self.servers)}",) if self.servers else ()
        line = [*DIGITS, "hydra.run.dir=run", *(own if keys else ()), *argv]
        told = environment(TRAINER_CACHE=str(self.folder / "cache"), **variables)
        with (self.folder / f"{who}.txt").open("w") as screen:
            self.started[who] = zygote().start(line, self.folder, told, screen.fileno(), screen.fileno())

    def ended(self) -> dict[str, int]:
        return {who: process.wait(PATIENCE_S) for who, process in self.started.items()}

    def screen(self, who: str) -> str:
        return (self.folder / f"{who}.txt").read_text()

    def screens(self) -> str:
        return "\n".join(f"--- {who}\n{self.screen(who)}" for who in self.started)

    @property
    def run(self) -> Path:
        return self.folder / "run"


def commands(folder: Path, workers: int, servers: int) -> Commands:
    at = [f"127.0.0.1:{port}" for port in ports(workers + servers)]
    return Commands(folder, at[:workers], at[workers:])


def ordinary(folder: Path, *argv: str) -> Path:
    """The run's folder of the same by one command."""
    folder.mkdir()
    ran = trainer(*DIGITS, "hydra.run.dir=run", *argv, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder / "run"


def assert_same(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    mine, theirs = read(one / "result.json")["metrics"], read(other / "result.json")["metrics"]
    assert {k: v for k, v in mine.items() if not k.startswith("perf/")} == {
        k: v for k, v in theirs.items() if not k.startswith("perf/")
    }


@pytest.mark.all
def test_commands_in_any_order_are_the_ordinary_run_and_the_plan_tells_where_all_were(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 2)
    for who in ("server 1", "worker 1"):
        mine.start(who, "strategy=pserver_sync")
    wait_for(lambda: all("Plan of" in mine.screen(who) for who in mine.started), PATIENCE_S, "two wait")
    for who in ("worker 0", "server 0"):
        mine.start(who, "strategy=pserver_sync")
    assert set(mine.ended().values()) == {0}, mine.screens()
    assert_same(mine.run, ordinary(tmp_path / "one", "strategy=pserver_sync", "launch.servers=2", "launch.workers=2"))
    plan = read(mine.run / "plan.json")
    at = {f"{p['role']} {p['rank']}": p["endpoint"] for p in plan["topology"]["processes"]}
    assert at == {
        **{f"worker {rank}": endpoint for rank, endpoint in enumerate(mine.workers)},
        **{f"server {rank}": f"tcp://{endpoint}" for rank, endpoint in enumerate(mine.servers)},
    }
    told = plan["topology"]["environment"]
    assert {told[role]["MASTER_PORT"] for role in ("worker", "server")} == {mine.workers[0].rpartition(":")[2]}
    assert len({p["pid"] for p in plan["topology"]["processes"]} - {0}) == 4
    assert "done server 1 served until its workers had left" in mine.screen("server 1")
    assert {p.name for p in mine.run.glob("*log.?")} == {"workerlog.0", "workerlog.1", "serverlog.0", "serverlog.1"}


@pytest.mark.all
def test_fleets_environment_starts_collective_workers(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 0)
    told = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(mine.workers)}
    for rank in (1, 0):
        own = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": mine.workers[rank]}
        mine.start(f"worker {rank}", "strategy=collective", "launch.env=paddle", keys=False, **told, **own)
    assert set(mine.ended().values()) == {0}, mine.screens()
    assert_same(mine.run, ordinary(tmp_path / "one", "strategy=collective", "launch.nproc=2"))


@pytest.mark.all
@pytest.mark.parametrize(
    "mode",
    [
        "pserver_async",
        pytest.param("pserver_ssp", marks=pytest.mark.long),
        pytest.param("pserver_geo", marks=pytest.mark.long),
    ],
)
def test_fleets_environment_starts_servers_and_workers(tmp_path: Path, mode: str) -> None:
    mine = commands(tmp_path, 2, 1)
    told = {
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(mine.workers),
        "PADDLE_PSERVERS_IP_PORT_LIST": mine.servers[0],
    }
    how = (f"strategy={mode}", "launch.env=paddle")
    for rank in range(2):
        own = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
        mine.start(f"worker {rank}", *how, keys=False, **told, **own)
    ip, _, port = mine.servers[0].rpartition(":")
    own = {"TRAINING_ROLE": "PSERVER", "POD_IP": ip, "PADDLE_PORT": port}
    mine.start("server 0", *how, keys=False, **told, **own)
    assert set(mine.ended().values()) == {0}, mine.screens()
    assert read(mine.run / "result.json")["status"] == "done"
    assert f"tcp://{mine.servers[0]}" in (mine.run / "serverlog.0").read_text()
    for rank in range(2):
        assert f" of worker {rank} (" in mine.screen(f"worker {rank}"), "each tells of its own updates"


@pytest.mark.all
def test_one_that_never_comes_is_named_with_its_endpoint_by_all(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 1)
    for who in ("worker 0", "worker 1"):
        mine.start(who, "strategy=pserver_sync", "launch.timeout_s=15")
    assert set(mine.ended().values()) == {1}, mine.screens()
    for who in mine.started:
        assert (
            f"server 0 ({mine.servers[0]}) did not come to {mine.workers[0]} within 15 s (launch.timeout_s)"
            in mine.screen(who)
        )


def test_command_with_another_config_is_named_with_what_differs(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 0)
    mine.start("worker 0", "strategy=collective")
    mine.start("worker 1", "strategy=collective", "optimizer.lr=0.3")
    assert set(mine.ended().values()) == {1}, mine.screens()
    says = f"worker 1 ({mine.workers[1]}) was started with another command: optimizer.lr is 0.3 there and"
    assert says in mine.screen("worker 0") and says in mine.screen("worker 1")


def processes_of(log: Path, among: Sequence[Started]) -> list[psutil.Process]:
    found = [child for one in among for child in psutil.Process(one.pid).children(recursive=True)]
    return [child for child in found if Path(f"/proc/{child.pid}/fd/1").resolve() == log.resolve()]


@pytest.mark.all
def test_server_that_dies_ends_all_commands_and_is_named(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 1)
    for who in ("worker 0", "worker 1", "server 0"):
        mine.start(who, "strategy=pserver_async", *LONG)
    wait_for(lambda: read(mine.run / "status.json").get("step", 0) > 5, PATIENCE_S, "they train")
    processes_of(mine.run / "serverlog.0", [mine.started["server 0"]])[0].kill()
    assert set(mine.ended().values()) == {1}, mine.screens()
    assert f"server 0 ({mine.servers[0]}) has ended the run: server 0 was killed by SIGKILL" in mine.screen("worker 0")


def test_port_that_is_taken_meanwhile_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunFailed, match=f"server 3 cannot listen at 127.0.0.1:{port}: Address already in use"):
            ServerSocket(bytes(32), 3, 1, "127.0.0.1", 1 << 20, port=port)


@pytest.mark.all
def test_ordinary_servers_listen_at_fixed_ports_and_are_as_before(tmp_path: Path) -> None:
    first = ports(1)[0]
    fixed = ordinary(tmp_path / "one", "strategy=pserver_sync", "launch.workers=1", f"launch.server_ports={first}")
    assert f"server 0 listens at tcp://127.0.0.1:{first}" in (fixed / "serverlog.0").read_text()
    servers = [p for p in read(fixed / "plan.json")["topology"]["processes"] if p["role"] == "server"]
    assert [p["endpoint"] for p in servers] == [f"tcp://127.0.0.1:{first}"]


@pytest.mark.all
def test_worker_alone_has_the_variables_of_every_process_while_it_works(tmp_path: Path) -> None:
    before = dict(os.environ)
    with alone():
        told = environment_of_this_process()
        assert set(told) == set(VARIABLES) and (told["RANK"], told["WORLD_SIZE"]) == ("0", "1")
    assert dict(os.environ) == before
    plan = read(ordinary(tmp_path / "one", "strategy=single") / "plan.json")
    assert {**plan["topology"]["environment"]["worker"], "MASTER_PORT": ""} == {**told, "MASTER_PORT": ""}
    assert (
        plan["topology"]["environment"]["worker"]["MASTER_PORT"].isdecimal()
        and plan["topology"]["processes"][0]["pid"] > 0
    )


GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:4,until:go,rank:0}]"


@pytest.mark.all
def test_worker_that_died_cannot_come_back_and_the_others_end_without_it(tmp_path: Path) -> None:
    mine = commands(tmp_path, 2, 1)
    how = ("strategy=pserver_async", "epochs=2", "max_steps=null", GATE)
    for who in ("worker 0", "worker 1", "server 0"):
        mine.start(who, *how)
    wait_for(lambda: read(mine.run / "status.json").get("step", 0) >= 1, PATIENCE_S, "they train")
    died = mine.started.pop("worker 1")
    died.kill()
    died.wait(PATIENCE_S)
    mine.start("worker 1", *how)
    assert mine.started.pop("worker 1").wait(PATIENCE_S) == 1
    again = " ".join(mine.screen("worker 1").split())
    assert f"the run at {mine.workers[0]} has begun, and worker 1 ({mine.workers[1]}) was part of it already" in again
    assert "start them again with resume=auto" in again
    (mine.run / "go").touch()
    assert set(mine.ended().values()) == {0}, mine.screens()
    result = read(mine.run / "result.json")
    assert result["status"] == "done" and [*result["lost_workers"]] == ["1"]
    assert result["metrics"]["val/loss"] > 0


@pytest.mark.all
@pytest.mark.parametrize("who", ["worker 0", pytest.param("worker 1", marks=pytest.mark.long), "server 0"])
def test_sigterm_to_one_command_is_a_checkpoint_of_all_and_the_run_goes_on_from_it(tmp_path: Path, who: str) -> None:
    mine = commands(tmp_path, 2, 1)
    everybody = ("worker 0", "worker 1", "server 0")
    for one in everybody:
        mine.start(one, "strategy=pserver_sync", "epochs=2", "max_steps=null", GATE)
    wait_for(lambda: read(mine.run / "status.json").get("step", 0) >= 1, PATIENCE_S, "they train")
    mine.started[who].send_signal(signal.SIGTERM)
    wait_for(lambda: "got SIGTERM" in mine.screen(who), PATIENCE_S, "it says so")
    (mine.run / "go").touch()
    assert mine.ended() == {"worker 0": 75, "worker 1": 75, "server 0": 0}, mine.screens()
    assert not (mine.run / "model.safetensors").exists(), "that is for a training that has ended"
    for one in everybody:
        mine.start(one, "strategy=pserver_sync", "epochs=2", "max_steps=null", GATE, "resume=auto")
    assert set(mine.ended().values()) == {0}, mine.screens()
    assert (mine.run / "model.safetensors").exists()
