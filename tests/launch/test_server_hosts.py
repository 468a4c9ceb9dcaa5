"""Parameter servers on several hosts: the results of one host, over IPv4 and IPv6; a server or a host that dies ends in
a sentence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.hosts import ENDS_WITHIN_S, PATIENCE_S, Hosts, end_in_time, ip, joined
from tests.pace import wait_for
from tests.runs import alive, read, trainer
from tests.zygote import Started
from trainer.strategies.pserver.protocol import snapshot

ADDRESSES = ("10.213.8.1", "10.213.8.2")
ADDRESSES_6 = ("fd00:213::1", "fd00:213::2")
DIGITS = (
    "+recipe=digits_lenet",
    "tracking=none",
    "execution.threads=1",
    "precision=fp64",
    "max_steps=12",
    "device=cpu",
    "data.global_batch_size=64",
    "execution.log_every=1",
)
LONG = ("max_steps=null", "epochs=100000", "execution.val_every=0", "limit_train_batches=20")
GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:10,until:go}]"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with joined(tmp_path, ADDRESSES) as pair:
        yield pair


@pytest.fixture
def hosts_6(tmp_path: Path) -> Iterator[Hosts]:
    with joined(tmp_path, ADDRESSES_6) as pair:
        yield pair


def ips(addresses: tuple[str, str] = ADDRESSES) -> str:
    return f"launch.ips={','.join(addresses)}"


def both(hosts: Hosts, *argv: str) -> list[Started]:
    return [hosts.start(n, *DIGITS, "launch.nproc=1", *argv) for n in range(2)]


def ended(hosts: Hosts, started: list[Started]) -> list[int]:
    return [process.wait(PATIENCE_S) for process in started]


def wait_until_they_train(hosts: Hosts, started: list[Started]) -> None:
    def far() -> bool:
        assert [process.poll() for process in started] == [None, None], hosts.screen(0) + hosts.screen(1)
        return read(hosts.at(0) / "run" / "status.json").get("step", 0) > 5

    wait_for(far, PATIENCE_S, "they train")


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of two workers on one host, at the end."""
    folder = tmp_path_factory.mktemp("one")
    ran = trainer(*DIGITS, "launch.nproc=2", "strategy=collective", "hydra.run.dir=run", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return read(folder / "run" / "result.json")["metrics"]


def assert_same_metrics(hosts: Hosts, on_one_host: dict[str, float]) -> None:
    result = read(hosts.at(0) / "run" / "result.json")
    assert result["status"] == "done" and result["steps"] == 12, hosts.screen(0)
    for name in ("train/loss", "val/loss", "val/acc1", "val/acc5"):
        assert result["metrics"][name] == pytest.approx(on_one_host[name], abs=1e-10), name


@pytest.mark.all
def test_servers_on_both_hosts_give_the_results_of_one_host(hosts: Hosts, on_one_host: dict[str, float]) -> None:
    started = both(hosts, "strategy=pserver_sync", "launch.servers=3", ips())
    assert ended(hosts, started) == [0, 0], hosts.screen(0) + hosts.screen(1)
    assert_same_metrics(hosts, on_one_host)
    for host, servers in enumerate(((0, 1), (2,))):
        here = hosts.at(host) / "run"
        assert {p.name for p in here.glob("serverlog.*")} == {f"serverlog.{number}" for number in servers}
        for number in servers:
            assert f"server {number} listens at tcp://{ADDRESSES[host]}:" in (here / f"serverlog.{number}").read_text()
    saved = snapshot.read(hosts.at(0) / "run" / "checkpoints" / "persistables")
    assert saved.servers == 3, "complete on host 0, although the hosts share no folder"
    assert not (hosts.at(1) / "run" / "checkpoints").exists()
    told = [read(hosts.at(0) / "run" / f"server.{number}.json") for number in range(3)]
    assert [s["server"] for s in told] == [0, 1, 2] and {s["version"] for s in told} == {12}, (
        "host 0 has all statistics"
    )
    assert "host 0: 2, host 1: 1" in hosts.screen(0)


@pytest.mark.all
def test_only_server_on_host_1_gives_the_results_of_one_host(hosts: Hosts, on_one_host: dict[str, float]) -> None:
    started = both(hosts, "strategy=pserver_sync", "launch.servers=1", "launch.server_hosts=1", ips())
    assert ended(hosts, started) == [0, 0], hosts.screen(0) + hosts.screen(1)
    assert_same_metrics(hosts, on_one_host)
    assert [[p.name for p in (hosts.at(n) / "run").glob("serverlog.*")] for n in range(2)] == [[], ["serverlog.0"]]
    assert f"server 0 listens at tcp://{ADDRESSES[1]}:" in (hosts.at(1) / "run" / "serverlog.0").read_text()


@pytest.mark.all
def test_collective_over_ipv6(hosts_6: Hosts, on_one_host: dict[str, float]) -> None:
    started = both(hosts_6, "strategy=collective", ips(ADDRESSES_6))
    assert ended(hosts_6, started) == [0, 0], hosts_6.screen(0) + hosts_6.screen(1)
    assert_same_metrics(hosts_6, on_one_host)


@pytest.mark.all
@pytest.mark.parametrize(
    "mode",
    [
        "pserver_sync",
        pytest.param("pserver_ssp", marks=pytest.mark.long),
        pytest.param("pserver_geo", marks=pytest.mark.long),
        pytest.param("pserver_async", marks=pytest.mark.long),
    ],
)
def test_processes_by_their_own_commands_on_two_hosts_over_ipv6(
    hosts_6: Hosts, on_one_host: dict[str, float], mode: str
) -> None:
    servers = [f"[{address}]:8000" for address in ADDRESSES_6]
    workers = [f"[{address}]:8100" for address in ADDRESSES_6]
    at = (f"launch.server_endpoints='{','.join(servers)}'", f"launch.worker_endpoints='{','.join(workers)}'")
    started = [
        hosts_6.start(
            n, *DIGITS, f"strategy={mode}", f"launch.role={role}", f"launch.rank={n}", *at, screen=f"{role}.txt"
        )
        for role in ("server", "worker")
        for n in (1, 0)
    ]
    screens = {f"{role} {n}": hosts_6.at(n) / f"{role}.txt" for role in ("server", "worker") for n in range(2)}
    assert ended(hosts_6, started) == [0] * 4, "\n".join(
        f"--- {who}\n{path.read_text()}" for who, path in screens.items()
    )
    if mode == "pserver_sync":
        assert_same_metrics(hosts_6, on_one_host)
    plan = read(hosts_6.at(0) / "run" / "plan.json")
    told = {f"{p['role']} {p['rank']}": p["endpoint"] for p in plan["topology"]["processes"]}
    assert {who: told[who] for who in ("server 0", "server 1")} == {
        f"server {n}": f"tcp://{servers[n]}" for n in range(2)
    }
    assert read(hosts_6.at(0) / "run" / "result.json")["status"] == "done"


@pytest.mark.parametrize("host", [0, 1])
def test_server_that_dies_ends_the_run_on_all_hosts_and_is_named(hosts: Hosts, host: int) -> None:
    started = both(hosts, *LONG, "strategy=pserver_async", "launch.servers=2", "launch.server_hosts=all", ips())
    wait_until_they_train(hosts, started)
    process_of(hosts, host, f"server {host}").kill()
    assert ended(hosts, started) == [1, 1], hosts.screen(0) + hosts.screen(1)
    death = f"server {host} was killed by SIGKILL"
    assert death in hosts.screen(host)
    assert f"host {host} ({ADDRESSES[host]}) has ended the run: {death}" in hosts.screen(1 - host)
    wait_for(lambda: not hosts.running(), ENDS_WITHIN_S, "all processes end")


@pytest.mark.all
def test_servers_of_a_host_whose_only_worker_dies_go_on_for_the_others(hosts: Hosts) -> None:
    spread = ("strategy=pserver_async", "launch.servers=2", "launch.server_hosts=all", ips())
    started = both(hosts, "max_steps=null", "epochs=2", *spread, GATE)
    wait_for(
        lambda: all(log(hosts, n).exists() and " batch 9]" in log(hosts, n).read_text() for n in range(2)),
        PATIENCE_S,
        "they train",
    )
    process_of(hosts, 1, "worker 1").kill()
    wait_for(lambda: "the others go on without it" in hosts.screen(1), PATIENCE_S, "host 1 knows it")
    (hosts.at(0) / "run" / "go").touch()
    assert ended(hosts, started) == [0, 1], hosts.screen(0) + hosts.screen(1)
    assert read(hosts.at(0) / "run" / "result.json")["status"] == "done"
    assert "worker 1 was killed by SIGKILL" in hosts.screen(1).partition("failed: ")[2], hosts.screen(1)
    wait_for(lambda: not hosts.running(), ENDS_WITHIN_S, "all processes end")


def log(hosts: Hosts, rank: int) -> Path:
    """What the worker of a host prints."""
    return hosts.at(rank) / "run" / f"workerlog.{rank}"


def process_of(hosts: Hosts, host: int, who: str) -> psutil.Process:
    """A started process, found by its log, which is its standard output."""
    role, rank = who.split()
    wanted = hosts.at(host) / "run" / f"{role}log.{rank}"
    for pid in ip("netns", "pids", hosts.names[host]).split():
        if Path(f"/proc/{pid}/fd/1").resolve() == wanted.resolve():
            return psutil.Process(int(pid))
    raise AssertionError(f"nobody writes {wanted}")


@pytest.mark.all
def test_host_without_servers_that_is_cut_off_loses_its_workers_and_the_others_go_on(hosts: Hosts) -> None:
    patience = ("strategy.lost_after_s=8", "strategy.timeout_s=20")
    first = ("strategy=pserver_async", "launch.servers=2", "launch.server_hosts=first", ips())
    started = both(hosts, "max_steps=null", "epochs=3", *first, *patience, GATE)
    wait_for(
        lambda: all(log(hosts, n).exists() and " batch 9]" in log(hosts, n).read_text() for n in range(2)),
        PATIENCE_S,
        "they train",
    )
    everybody = [psutil.Process(int(pid)) for pid in hosts.running()]
    hosts.cut()
    (hosts.at(1) / "run" / "go").touch()
    wait_for(lambda: "is lost" in hosts.screen(0), PATIENCE_S, "host 0 knows it")
    (hosts.at(0) / "run" / "go").touch()
    assert ended(hosts, started) == [0, 1], hosts.screen(0) + hosts.screen(1)
    result = read(hosts.at(0) / "run" / "result.json")
    assert result["status"] == "done" and list(result["lost_workers"]) == ["1"], result
    assert f"worker 1 on host 1 ({ADDRESSES[1]}) is lost: nothing was heard of it for 8 s" in hosts.screen(0)
    assert "host 0" in hosts.screen(1).partition("failed: ")[2], hosts.screen(1)
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "lost_after_s"),
    [
        ("pserver_async", 5),
        *(pytest.param(mode, 30, marks=pytest.mark.long) for mode in ("pserver_sync", "pserver_async")),
    ],
)
def test_host_with_a_server_that_is_cut_off_ends_the_run_in_time_and_is_named(
    hosts: Hosts, mode: str, lost_after_s: int
) -> None:
    """Whether a server declares the workers lost that it does not hear of, or its own workers cannot wait any longer,
    first."""
    patience = (f"strategy.lost_after_s={lost_after_s}", "strategy.timeout_s=10")
    started = both(hosts, *LONG, f"strategy={mode}", "launch.servers=2", *patience, ips())
    wait_until_they_train(hosts, started)
    everybody = [psutil.Process(int(pid)) for pid in hosts.running()]
    hosts.cut()
    assert end_in_time(started, time.monotonic(), 10) == [1, 1], hosts.screen(0) + hosts.screen(1)
    said = hosts.screen(0).partition("failed: ")[2]
    assert "server 1 (host 1) did not answer" in said or "worker 1" in said, hosts.screen(0)
    assert "host 0" in hosts.screen(1).partition("failed: ")[2], hosts.screen(1)
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")
