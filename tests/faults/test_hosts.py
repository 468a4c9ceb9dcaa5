"""Several hosts, each a launcher of its own on the loopback, whose folder is shared: they save together, and end
together."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.loopback import GATE, loopback, same
from tests.pace import wait_for
from tests.runs import losses, read


@pytest.mark.all
@pytest.mark.parametrize(
    ("whom", "number"),
    [((1,), signal.SIGTERM), ((0,), signal.SIGUSR1), pytest.param((0, 1), signal.SIGTERM, marks=pytest.mark.long)],
    ids=["host 1", "host 0", "all"],
)
def test_hosts_that_are_preempted_save_one_checkpoint_together_and_tell_how_to_go_on(
    whom: Sequence[int], number: signal.Signals, tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    with loopback(tmp_path, "launch.nnodes=2", GATE.format(6, "")) as hosts:
        both = [hosts.start(0), hosts.start(1)]
        wait_for(lambda: hosts.at_the_gate(6), 120, "the workers wait")
        for host in whom:
            both[host].send_signal(number)
            wait_for(lambda host=host: f"got {number.name}" in hosts.screen(host), 30, "it says so")
        hosts.go()
        assert [host.wait(120) for host in both] == [75, 75], hosts.all_screens()
        for host, own in ((0, hosts.run), (1, hosts.run / "host.1")):
            assert read(own / "status.json")["state"] == read(own / "result.json")["status"] == "preempted", own
            lines = hosts.screen(host).splitlines()
            assert lines[-2] == "preempted: a checkpoint was saved after update 7"
            assert lines[-1].startswith("resume    python -m trainer +recipe=digits_lenet") and lines[-1].endswith(
                " resume=auto"
            )
            assert f" launch.node_rank={host} " in lines[-1]
        saved = [path.name for path in (hosts.run / "checkpoints").iterdir() if path.is_dir()]
        assert saved == ["step-000000007"], "one checkpoint, of all"
        assert {path.name for path in (hosts.run / "checkpoints" / saved[0]).glob("worker-*")} == {
            "worker-0.safetensors",
            "worker-1.safetensors",
        }
        if whom == (1,):
            both = [hosts.start(0, "resume=auto"), hosts.start(1, "resume=auto")]
            assert [host.wait(120) for host in both] == [0, 0], hosts.all_screens()
            assert same(losses(hosts.run), by_one_worker)


@pytest.mark.all
@pytest.mark.parametrize(
    ("strategy", "whom", "more"),
    [
        ("collective", 1, []),
        pytest.param("collective", 0, [], marks=pytest.mark.long),
        pytest.param("local_sgd", 0, ["strategy.k_steps=2"], marks=pytest.mark.long),
        pytest.param(
            "pserver_sync", 1, ["launch.servers=2", "launch.workers=2", "launch.insecure=true"], marks=pytest.mark.long
        ),
    ],
    ids=["host 1", "host 0", "replicas", "servers"],
)
def test_hosts_that_share_no_folder_save_one_checkpoint_at_the_address_and_other_hosts_go_on_from_it(
    strategy: str, whom: int, more: list[str], tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    words = ["launch.nnodes=2", f"strategy={strategy}", f"checkpoint.to=file://{tmp_path}", GATE.format(6, "")]
    with loopback(tmp_path, *words, *more, apart=True) as hosts:
        both = [hosts.start(0), hosts.start(1)]
        wait_for(lambda: hosts.at_the_gate(6), 120, "the workers wait")
        both[whom].send_signal(signal.SIGTERM)
        wait_for(lambda: "got SIGTERM" in hosts.screen(whom), 30, "it says so")
        hosts.go()
        assert [host.wait(120) for host in both] == [75, 75], hosts.all_screens()
        (saved,) = (tmp_path / "store").glob("step-*/COMPLETE")
        parts = {path.name for path in saved.parent.glob("*-?.safetensors")}
        roles = ("worker", "server") if strategy == "pserver_sync" else ("worker",)
        assert parts == {f"{role}-{number}.safetensors" for role in roles for number in range(2)}
        assert not list(hosts.folder_of(1).glob("checkpoints/step-*")), "nothing is left on the other host"
        for number in range(2):  # other machines
            hosts.folder_of(number).rename(tmp_path / f"gone.{number}")
        both = [hosts.start(0, "resume=auto"), hosts.start(1, "resume=auto")]
        wait_for(lambda: all(hosts.folder_of(n).is_dir() for n in range(2)), 120, "the folders are there")
        hosts.go()
        assert [host.wait(120) for host in both] == [0, 0], hosts.all_screens()
        assert f"goes on from {hosts.run}/checkpoints/{saved.parent.name}" in hosts.screen(0)
        if strategy == "local_sgd":
            assert [step for step, _ in losses(hosts.run)] == list(range(1, losses(hosts.run)[-1][0] + 1))
        else:
            assert same(losses(hosts.run), by_one_worker)
