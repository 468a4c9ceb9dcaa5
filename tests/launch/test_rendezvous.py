"""Several hosts for real, as one job: who comes late, who never comes, who is cut off, who is a stranger."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.faults.gate import WAITS
from tests.launch.hosts import ENDS_WITHIN_S, PATIENCE_S, SECRET, Hosts, end_in_time, joined
from tests.pace import wait_for
from tests.runs import alive, read, script, trainer
from trainer.errors import RunFailed
from trainer.host import addresses
from trainer.launch import rendezvous
from trainer.launch.rendezvous import HEARD, Rendezvous, meet

ADDRESSES = ("10.213.7.1", "10.213.7.2")
DIGITS = (
    "+recipe=digits_lenet",
    "tracking=none",
    "execution.threads=1",
    "precision=fp64",
    "max_steps=30",
    "device=cpu",
    "data.global_batch_size=64",
    "launch.nproc=2",
    "execution.log_every=1",
)
LONG = ("max_steps=null", "epochs=100000", "execution.val_every=0")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with joined(tmp_path, ADDRESSES) as pair:
        yield pair


def node(number: int) -> tuple[str, ...]:
    return "launch.nnodes=2", f"launch.node_rank={number}", f"launch.master_addr={ADDRESSES[0]}"


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of four workers on one host, at the end."""
    folder = tmp_path_factory.mktemp("one")
    done = trainer(*DIGITS, "launch.nproc=4", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return read(folder / "run" / "result.json")["metrics"]


def assert_same_metrics(hosts: Hosts, on_one_host: dict[str, float]) -> None:
    result = read(hosts.at(0) / "run" / "result.json")
    assert result["status"] == "done" and result["steps"] == 30, hosts.screen(0)
    for name in ("train/loss", "val/loss", "val/acc1", "val/acc5"):
        assert result["metrics"][name] == pytest.approx(on_one_host[name], abs=1e-10), name


@pytest.mark.all
def test_same_command_on_each_of_two_hosts_is_one_job_even_if_one_comes_late(
    hosts: Hosts, on_one_host: dict[str, float]
) -> None:
    command = (*DIGITS, f"launch.ips={','.join(ADDRESSES)}")
    first = hosts.start(0, *command)
    wait_for(lambda: "Plan of" in hosts.screen(0), PATIENCE_S, "host 0 has planned")
    time.sleep(3)
    assert not (hosts.at(0) / "run" / "workerlog.0").exists(), "nobody starts before all are there"
    second = hosts.start(1, *command)
    assert [first.wait(PATIENCE_S), second.wait(PATIENCE_S)] == [0, 0], hosts.screen(0) + hosts.screen(1)
    assert_same_metrics(hosts, on_one_host)
    assert {p.name for p in (hosts.at(0) / "run").glob("workerlog.*")} == {"workerlog.0", "workerlog.1"}
    assert {p.name for p in (hosts.at(1) / "run").glob("workerlog.*")} == {"workerlog.2", "workerlog.3"}
    own = read(hosts.at(1) / "run" / "host.1" / "result.json")
    assert own["metrics"]["val/loss"] == pytest.approx(on_one_host["val/loss"], abs=1e-10)
    assert not (hosts.at(1) / "run" / "result.json").exists(), "a folder that hosts share belongs to host 0"


@pytest.mark.all
def test_servers_on_host_0_serve_the_workers_of_all_hosts(hosts: Hosts, on_one_host: dict[str, float]) -> None:
    both = [
        hosts.start(n, *DIGITS, "strategy=pserver_sync", "launch.servers=2", "launch.server_hosts=first", *node(n))
        for n in range(2)
    ]
    assert [host.wait(PATIENCE_S) for host in both] == [0, 0], hosts.screen(0) + hosts.screen(1)
    assert_same_metrics(hosts, on_one_host)
    for number in range(2):
        log = (hosts.at(0) / "run" / f"serverlog.{number}").read_text()
        assert f"tcp://{ADDRESSES[0]}:" in log, "encrypted, and at the address that host 1 reaches"
    for path in hosts.folder.rglob("*"):
        if path.is_file() and path.name != "run.secret":
            assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.all
def test_program_that_reaches_the_store_between_hosts_changes_no_run_with_a_secret(hosts: Hosts) -> None:
    gate = "callbacks=[{_target_:tests.faults.gate.Gate,at:10,until:go,rank:0}]"
    served = ("strategy=pserver_async", "launch.servers=1", "max_steps=100", gate)
    both = [hosts.start(n, *DIGITS, *served, *node(n)) for n in range(2)]
    log = hosts.at(0) / "run" / "workerlog.0"
    wait_for(lambda: log.exists() and WAITS in log.read_text(), PATIENCE_S, "they train")
    notes = {f"{said}/worker/{rank}": "its process ended" for said in ("lost", "done", "fenced") for rank in range(4)}
    notes |= {"endpoint/server/0": "tcp://127.0.0.1:1", "hosts/why not": "because"}
    lie = (
        "import json, sys, torch.distributed as dist; "
        f"store = dist.TCPStore('{ADDRESSES[0]}', 29500, is_master=False, wait_for_workers=False); "
        "[store.set(f'{where}{key}', note) for key, note in json.loads(sys.argv[1]).items() for where in ('', "
        "'board/')]; "
        "print('told')"
    )
    told = script(lie, json.dumps(notes), cwd=hosts.folder, network=hosts.names[1])
    assert "told" in told.stdout, told.stderr
    (hosts.at(0) / "run" / "go").touch()
    assert [host.wait(PATIENCE_S) for host in both] == [0, 0], hosts.screen(0) + hosts.screen(1)
    assert not read(hosts.at(0) / "run" / "result.json")["lost_workers"]
    said = "".join(path.read_text() for path in hosts.folder.rglob("*log.*")) + hosts.screen(0) + hosts.screen(1)
    assert "lost/worker/0 in the launcher's store is not of this run and is ignored" in said


@pytest.mark.all
def test_hosts_with_different_secrets_do_not_start(hosts: Hosts) -> None:
    both = [hosts.start(n, *DIGITS, *node(n), secret=secret) for n, secret in enumerate((SECRET, SECRET[::-1]))]
    assert [host.wait(PATIENCE_S) for host in both] == [1, 1], hosts.screen(0) + hosts.screen(1)
    assert "host 1 knows another secret than this host" in hosts.screen(0)
    assert "host 0 knows another secret than this host" in hosts.screen(1)


@pytest.mark.all
def test_host_that_never_comes_is_named_in_time_and_nothing_is_left(hosts: Hosts) -> None:
    alone = hosts.start(0, *DIGITS, f"launch.ips={','.join(ADDRESSES)}", "launch.timeout_s=4")
    assert alone.wait(PATIENCE_S) == 1
    assert (
        f"host 1 ({ADDRESSES[1]}) did not come to {ADDRESSES[0]}:29500 within 4 s (launch.timeout_s)" in hosts.screen(0)
    )
    wait_for(lambda: not hosts.running(), ENDS_WITHIN_S, "all processes end")
    assert read(hosts.at(0) / "run" / "result.json")["status"] == "failed"


@pytest.mark.all
def test_host_that_is_cut_off_is_named_and_all_hosts_end(hosts: Hosts) -> None:
    patience = ("strategy.timeout_s=12", "strategy=collective")
    both = [hosts.start(n, *DIGITS, *LONG, *patience, *node(n)) for n in range(2)]
    wait_for(lambda: read(hosts.at(0) / "run" / "status.json").get("step", 0) > 20, PATIENCE_S, "they train")
    everybody = [psutil.Process(int(pid)) for pid in hosts.running()]
    assert len(everybody) >= 6
    hosts.cut()
    assert end_in_time(both, time.monotonic(), 12) == [1, 1], hosts.screen(0) + hosts.screen(1)
    assert "worker 2 (host 1), worker 3 (host 1) did not arrive at " in hosts.screen(0)
    # Worker 0 waits the whole time; worker 1 may hear sooner that worker 0 has given up, and be the first to say so.
    limit = r"within 12 s \(strategy.timeout_s\)|: after 1\d s .+ \(strategy.timeout_s=12\)"
    assert re.search(limit, hosts.screen(0)), hosts.screen(0)
    assert "host 0 cannot be reached" in hosts.screen(1)
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")


@pytest.mark.all
def test_worker_that_breaks_is_shown_by_its_host_and_named_by_the_other(hosts: Hosts) -> None:
    broken = ("model._target_=tests.e2e.own_models.Breaks", "~model.in_channels", "~model.image_size", "+model.rank=3")
    both = [hosts.start(n, *DIGITS, *LONG, *broken, *node(n)) for n in range(2)]
    assert [host.wait(PATIENCE_S) for host in both] == [1, 1], hosts.screen(0) + hosts.screen(1)
    assert "the model broke on purpose" in hosts.screen(1), hosts.screen(1)
    assert "worker 3" in hosts.screen(0).partition("failed: ")[2], hosts.screen(0)
    wait_for(lambda: not hosts.running(), ENDS_WITHIN_S, "all processes end")


def test_interface_of_an_address_is_found() -> None:
    assert addresses.interface_of("127.0.0.1") == addresses.interface_towards("127.0.0.1") == "lo"
    assert addresses.interface_of("240.0.0.1") is None  # no host has such a one


def come(store: dist.Store, host: Rendezvous) -> str:
    """Why a meeting fails for a host; empty: it does not."""
    try:
        meet(store, host)
    except RunFailed as error:
        return str(error)
    return ""


def meetings(*hosts: Rendezvous) -> list[str]:
    """How a meeting of these ends for each, in one process."""
    stores = [dist.HashStore()] * len(hosts)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(come, stores, hosts))


def test_hosts_that_were_started_differently_say_what_differs() -> None:
    terms = {"seed": 0, "strategy.clip_norm": None}
    assert meetings(Rendezvous(number=0, hosts=2, terms=terms), Rendezvous(number=1, hosts=2, terms=terms)) == ["", ""]
    for said in meetings(
        Rendezvous(number=0, hosts=2, terms=terms), Rendezvous(number=1, hosts=2, terms={**terms, "seed": 1})
    ):
        assert said.startswith("host 1 was started with another command: seed is 1 there and 0 on host 0")


@pytest.mark.parametrize(("mine", "theirs"), [("a" * 32, "b" * 32), ("a" * 32, ""), ("", "b" * 32)])
def test_hosts_with_different_secrets_say_so(mine: str, theirs: str) -> None:
    first, second = meetings(Rendezvous(number=0, hosts=2, secret=mine), Rendezvous(number=1, hosts=2, secret=theirs))
    assert first.startswith("host 1 knows another secret than this host.")
    assert second.startswith("host 0 knows another secret than this host, or somebody else writes into the store at")


def test_host_that_comes_when_host_0_has_given_up_hears_that_it_is_late() -> None:
    """It came in time with the right secret; its store still has the verdict."""
    store = dist.HashStore()
    first, second = (Rendezvous(number=number, hosts=2, secret="a" * 32, timeout_s=0.2) for number in range(2))
    assert come(store, first).startswith("host 1 did not come to")
    said = come(store, second)
    assert said.startswith("host 0 had given up at ") and "within 0.2 s (launch.timeout_s)" in said


def test_runs_secret_is_the_same_on_all_hosts_and_new_in_each_run() -> None:
    def once() -> list[bytes]:
        store = dist.HashStore()
        with ThreadPoolExecutor() as pool:
            hosts = [Rendezvous(number=number, hosts=3, secret="a" * 32) for number in range(3)]
            return list(pool.map(meet, [store] * 3, hosts))

    one, two = once(), once()
    assert len(set(one)) == len(set(two)) == 1 and one[0] != two[0] and len(one[0]) == 32


def test_what_host_0_said_in_another_run_is_not_believed() -> None:
    store = dist.HashStore()
    hosts = [Rendezvous(number=number, hosts=2, secret="a" * 32, timeout_s=5) for number in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(meet, [store] * 2, hosts))
    again = dist.HashStore()
    for key in ("hosts/run", "hosts/answer/1", "board/hosts/why not"):
        again.set(key, store.get(key).decode())
    with pytest.raises(RunFailed, match="host 0 knows another secret"):
        meet(again, hosts[1])


def test_two_hosts_of_the_same_number_are_told() -> None:
    store, host_1 = dist.HashStore(), Rendezvous(number=1, hosts=2, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        twins = [pool.submit(come, store, host_1) for _ in range(2)]
        wait_for(lambda: any(twin.done() for twin in twins), 60, "the second one is told")
        assert come(store, Rendezvous(number=0, hosts=2, timeout_s=60)) == ""
        told = sorted(twin.result() for twin in twins)
    assert told == ["", "there is another host 1 already: every host needs a launch.node_rank of its own"]
    again = come(store, host_1)
    assert "has begun, and host 1 was part of it already. A host that is started again cannot come back." in again


class Held:
    """A host's store; the host has read why nothing starts, and does not say so before it may."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.has_read, self.may = store, Event(), Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        if key == HEARD.format(1):
            self.has_read.set()
            assert self.may.wait(60)
        self.store.set(key, value)


@pytest.mark.parametrize("ever", [True, False])
def test_host_0_ends_when_the_others_have_read_why_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch, ever: bool
) -> None:
    monkeypatch.setattr(rendezvous, "TELL_S", 60.0 if ever else 0.5)
    store = dist.HashStore()
    other = Held(store)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, store, Rendezvous(number=0, hosts=2, terms={"seed": 0}))
        second = pool.submit(meet, other, Rendezvous(number=1, hosts=2, terms={"seed": 1}))
        assert other.has_read.wait(60)
        if ever:
            time.sleep(0.5)
            assert not first.done(), "host 1 could find nothing but a store that is gone"
            other.may.set()
        assert "seed is 1" in str(first.exception(30))
        other.may.set()
        assert "seed is 1" in str(second.exception(30))
