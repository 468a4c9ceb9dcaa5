"""launch.nnodes=MIN:MAX: hosts die, leave and come, and the run goes on with those that are there; the numbers stay."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.gate import WAITS
from tests.faults.loopback import BASE, GATE, Loopback, loopback, same
from tests.ledgers import applied
from tests.pace import wait_for
from tests.runs import family, kill, losses, read, trainer
from tests.zygote import Started
from trainer import run as run_here
from trainer.errors import UserError

ELASTIC = ("launch.join_s=600", "checkpoint.every_steps=2")
SERVED = (
    "strategy=pserver_sync",
    "launch.nproc=1",
    "launch.servers=3",
    "launch.server_hosts=all",
    "launch.insecure=true",
)
AT = 7
LONG = 180


def together(hosts: Loopback, *numbers: int) -> list[Started]:
    """Start these hosts; returns when their workers wait at the gate."""
    started = [hosts.start(number) for number in numbers]
    wait_for(lambda: hosts.at_the_gate(AT), LONG, "the workers wait")
    return started


def lose_power(process: Started) -> None:
    """As a machine that loses its power: the launcher and all that it has started."""
    kill(family(process.pid))
    process.wait()


def lives(run: Path) -> list[tuple[str, int, int]]:
    """How each life ended, after which update it began, and its workers."""
    return [(life["how"], life["first"], life["workers"]) for life in json.loads((run / "lives.json").read_text())]


def test_host_that_is_killed_is_missed_and_one_that_comes_later_is_let_in(
    tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    gate = "_target_:tests.faults.gate.Gate"
    gates = f"callbacks=[{{{gate},at:{AT},until:go}},{{{gate},at:12,until:go2}}]"
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=2:3", gates) as hosts:
        first, second, third = together(hosts, 0, 1, 2)
        lose_power(second)
        hosts.go()
        wait_for(lambda: hosts.at_the_gate(12), LONG, "the others go on")
        assert "ATTENTION: host 1 is lost" in hosts.screen(0)
        assert "restart 1 of 3: all processes are started again, from step-000000006" in hosts.screen(0)
        assert (
            "life 2: hosts 0 and 2, 2 workers with at most 16 of 32 samples each, from step-000000006"
            in hosts.screen(0)
        )
        assert "life 2: hosts 0 and 2, 2 workers" in hosts.screen(2)
        assert read(hosts.run / "plan.json")["topology"]["roles"] == {"worker": 2}
        second = hosts.start(1)
        wait_for(lambda: "host 1 came in" in hosts.screen(0), LONG, "host 1 comes")
        hosts.go("2")
        assert [host.wait(LONG) for host in (first, second, third)] == [0, 0, 0], hosts.all_screens()
        assert (
            "life 3: hosts 0, 1 and 2, 3 workers with at most 11 of 32 samples each, from step-000000013"
            in hosts.screen(1)
        )
        assert [(how, workers) for how, _, workers in lives(hosts.run)] == [
            ("failed", 3),
            ("preempted", 2),
            ("done", 3),
        ]
        assert same(losses(hosts.run), by_one_worker)
        assert read(hosts.run / "result.json")["restarts"] == 1, "who comes in is no restart"


@pytest.mark.all
@pytest.mark.parametrize("strategy", [pytest.param("collective", marks=pytest.mark.long), "local_sgd", "pserver_sync"])
def test_host_that_gets_sigterm_leaves_and_loses_nothing(
    strategy: str, tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    """local_sgd with an average after each update and momentum is one process as well; of three servers one is on the
    host that leaves."""
    told = {"local_sgd": ("strategy.k_steps=1",), "pserver_sync": SERVED}.get(strategy, ())
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", f"strategy={strategy}", *told, GATE.format(AT, "")) as hosts:
        first, second = together(hosts, 0, 1)
        second.send_signal(signal.SIGTERM)
        wait_for(lambda: "got SIGTERM" in hosts.screen(1), 30, "it says so")
        hosts.go()
        assert [second.wait(LONG), first.wait(LONG)] == [75, 0], hosts.all_screens()
        assert hosts.screen(1).splitlines()[-1].startswith("resume    python -m trainer +recipe=digits_lenet")
        saved = AT + (2 if strategy == "pserver_sync" else 1)  # the first update that nobody ends before all know of it
        assert lives(hosts.run) == [("preempted", 0, 2), ("done", saved, 1)]
        assert same(losses(hosts.run), by_one_worker)
        assert read(hosts.run / "result.json")["restarts"] == 0
        lost = "not carried over: what tells the replicas of 2 workers apart" in hosts.screen(0)
        assert lost == (strategy == "local_sgd")


@pytest.mark.long
def test_host_that_gets_sigterm_before_the_first_update_leaves_and_the_others_begin_without_it(
    tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    late = "callbacks=[{_target_:tests.faults.gate.Late,until:go}]"
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", late) as hosts:
        first, second = hosts.start(0), hosts.start(1)
        log = hosts.run / "workerlog.1"
        wait_for(lambda: log.exists() and WAITS in log.read_text(), LONG, "its worker waits")
        second.send_signal(signal.SIGTERM)
        assert second.wait(LONG) == 75, hosts.all_screens()
        hosts.go()
        assert first.wait(LONG) == 0, hosts.all_screens()
        assert "goes on without hosts that have left" in hosts.screen(0)
        assert [(how, workers) for how, _, workers in lives(hosts.run)] == [("failed", 2), ("done", 1)]
        assert same(losses(hosts.run), by_one_worker)
        assert read(hosts.run / "result.json")["restarts"] == 0


@pytest.mark.long
def test_host_with_servers_that_is_killed_is_missed(tmp_path: Path, by_one_worker: list[tuple[int, float]]) -> None:
    """Its servers' parts of the checkpoint are shared out among the servers of the next life, which are as many."""
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", *SERVED, GATE.format(AT, "")) as hosts:
        first, second = together(hosts, 0, 1)
        assert "servers on     host 0: 2, host 1: 1" in hosts.screen(0)
        lose_power(second)
        hosts.go()
        assert first.wait(LONG) == 0, hosts.all_screens()
        assert "ATTENTION: host 1 is lost" in hosts.screen(0)
        assert lives(hosts.run) == [("failed", 0, 2), ("done", 6, 1)]
        assert same(losses(hosts.run), by_one_worker)


APART = (
    "launch.nproc=1",
    "launch.servers=2",
    "launch.server_hosts=all",
    "launch.insecure=true",
    "data.global_batch_size=null",
    "data.batch_size=16",
    "limit_train_batches=null",
    "epochs=1",
    "strategy.ledger=true",
    "strategy.persistables=false",
)
"""Workers out of step, with servers on all hosts."""


def gates(*where: tuple[int, str]) -> str:
    """The first worker waits there: a stop would wait for whoever waits elsewhere. The others are slow, and on their
    way."""
    each = [f"{{_target_:tests.faults.gate.Gate,at:{at},until:go{which},rank:0}}" for at, which in where]
    return f"callbacks=[{{_target_:tests.faults.gate.Slow,seconds:0.05}},{','.join(each)}]"


def check_each_batch_once(run: Path) -> None:
    """1438 samples are 89 whole batches of 16."""
    found = applied(run / "ledger.0.tsv")
    assert set(found.values()) == {1}, found.most_common(3)
    assert len(found) == 89
    assert applied(run / "ledger.1.tsv") == found


@pytest.mark.long
def test_hosts_without_a_common_step_die_and_come_and_each_batch_is_applied_once(tmp_path: Path) -> None:
    """It dies with its worker's pushes under way, and in the middle of a block."""
    with loopback(
        tmp_path, *ELASTIC, "launch.nnodes=1:2", "strategy=pserver_async", *APART, gates((AT, ""), (16, "2"))
    ) as hosts:
        first, second = together(hosts, 0, 1)
        lose_power(second)
        hosts.go()
        wait_for(lambda: hosts.at_the_gate(16), LONG, "host 0 goes on")
        assert "ATTENTION: host 1 is lost" in hosts.screen(0)
        assert "life 2: host 0, 1 worker with batches of 16 samples, from step-0000000" in hosts.screen(0)
        second = hosts.start(1)
        wait_for(lambda: "host 1 came in" in hosts.screen(0), LONG, "host 1 comes")
        hosts.go("2")
        assert [host.wait(LONG) for host in (first, second)] == [0, 0], hosts.all_screens()
        assert [(how, workers) for how, _, workers in lives(hosts.run)] == [
            ("failed", 2),
            ("preempted", 1),
            ("done", 2),
        ]
        check_each_batch_once(hosts.run)


@pytest.mark.long
def test_host_of_replicas_leaves_and_what_it_had_not_exchanged_is_trained_on_again(tmp_path: Path) -> None:
    """k_steps=3: at the stop workers have up to two batches that no server knows."""
    geo = ("strategy=pserver_geo", "strategy.k_steps=3", *APART)
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", *geo, gates((AT, ""))) as hosts:
        first, second = together(hosts, 0, 1)
        second.send_signal(signal.SIGTERM)
        wait_for(lambda: "got SIGTERM" in hosts.screen(1), 30, "it says so")
        hosts.go()
        assert [second.wait(LONG), first.wait(LONG)] == [75, 0], hosts.all_screens()
        assert [(how, workers) for how, _, workers in lives(hosts.run)] == [("preempted", 2), ("done", 1)]
        assert "not carried over: what tells the replicas of workers apart" in hosts.screen(0)
        check_each_batch_once(hosts.run)


@pytest.mark.all
def test_all_leave_with_host_0_and_the_same_commands_go_on(
    tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", GATE.format(AT, "")) as hosts:
        both = together(hosts, 0, 1)
        both[0].send_signal(signal.SIGTERM)
        wait_for(lambda: "got SIGTERM" in hosts.screen(0), 30, "it says so")
        hosts.go()
        assert [host.wait(LONG) for host in both] == [75, 75], hosts.all_screens()
        for number in (0, 1):
            assert hosts.screen(number).splitlines()[-1].endswith(" resume=auto"), hosts.screen(number)
        assert read(hosts.run / "status.json")["state"] == "preempted"
        both = [hosts.start(0, "resume=auto"), hosts.start(1, "resume=auto")]
        assert [host.wait(LONG) for host in both] == [0, 0], hosts.all_screens()
        assert same(losses(hosts.run), by_one_worker)


@pytest.mark.all
def test_process_that_dies_on_another_host_is_followed_by_a_life_with_all(
    tmp_path: Path, by_one_worker: list[tuple[int, float]]
) -> None:
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=2:2", GATE.format(AT, "")) as hosts:
        both = together(hosts, 0, 1)
        next(p for p in family(both[1].pid) if writes(p, hosts.run / "workerlog.1")).kill()
        hosts.go()
        assert [host.wait(LONG) for host in both] == [0, 0], hosts.all_screens()
        assert "ATTENTION: worker 1 was killed by SIGKILL" in hosts.screen(0)
        assert lives(hosts.run) == [("failed", 0, 2), ("done", 6, 2)]
        assert same(losses(hosts.run), by_one_worker)


def writes(process: psutil.Process, log: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log
    except OSError:
        return False


@pytest.mark.all
def test_run_ends_with_host_0_and_the_others_tell_how_to_go_on(tmp_path: Path) -> None:
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", GATE.format(AT, "")) as hosts:
        first, second = together(hosts, 0, 1)
        lose_power(first)
        hosts.go()
        assert second.wait(LONG) == 1, hosts.all_screens()
        assert "host 0" in hosts.screen(1) and "is gone" in hosts.screen(1)
        assert hosts.screen(1).splitlines()[-1].endswith(" resume=auto")


@pytest.mark.all
def test_own_error_of_a_worker_ends_the_run(tmp_path: Path) -> None:
    broken = ("model._target_=tests.e2e.own_models.Breaks", "~model.in_channels", "~model.image_size", "+model.rank=1")
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=1:2", *broken) as hosts:
        both = [hosts.start(0), hosts.start(1)]
        assert [host.wait(LONG) for host in both] == [1, 1], hosts.all_screens()
        assert "the model broke on purpose" in hosts.screen(1)
        assert "life 2" not in hosts.screen(0)


@pytest.mark.all
def test_host_that_does_not_see_the_folder_or_has_a_number_twice_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with loopback(tmp_path, *ELASTIC, "launch.nnodes=2:3", "launch.join_s=0", GATE.format(AT, "")) as hosts:
        both = together(hosts, 0, 1)
        others = [hosts.start(1), hosts.start(2, f"hydra.run.dir={tmp_path / 'elsewhere'}")]
        assert [other.wait(LONG) for other in others] == [1, 2], hosts.all_screens()
        assert "there is another host 1 already: every host needs a launch.node_rank of its own" in hosts.screen(1)
        assert "elsewhere: is not the folder that host 0 writes to" in hosts.screen(2)
        hosts.go()
        assert [host.wait(LONG) for host in both] == [0, 0], hosts.all_screens()
        assert "came in" not in hosts.screen(0) and lives(hosts.run) == [("done", 0, 2)]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (("launch.nnodes=3:2",), "launch.nnodes=3:2: must be MIN:MAX, and 3 is more than 2"),
        (("launch.nnodes=1:x",), "launch.nnodes=1:x: must be a whole number of hosts, or MIN:MAX of them"),
        (("launch.nnodes=0:2",), "launch.nnodes=0:2: must be at least 1 host. Type instead: launch.nnodes=1"),
        (
            ("strategy=pserver_async", "launch.insecure=true", "data.work=static"),
            (
                "data.work=static gives each worker its own part of an epoch, so their number stays. Type "
                "instead: data.work=leased"
            ),
        ),
        (
            ("strategy=pserver_ssp", "launch.insecure=true", "data.global_batch_size=64"),
            "data.global_batch_size would change the batches that are handed out. Type instead: data.batch_size=N",
        ),
        (
            ("strategy=pserver_geo", "launch.insecure=true", "max_steps=9"),
            "max_steps=9 counts those of each worker, whose number changes. Type instead: max_steps=null",
        ),
        (
            ("strategy=pserver_sync", "launch.insecure=true", "strategy.on_lost_worker=continue"),
            (
                "strategy.on_lost_worker=continue goes on without lost workers by itself. Type instead: "
                "strategy.on_lost_worker=stop"
            ),
        ),
        (("checkpoint=none",), "without checkpoints there is nothing to go on from. Type instead: checkpoint=auto"),
        (
            ("launch.workers=4", "launch.nproc=null"),
            (
                "launch.workers is their number on all hosts, which changes. Type instead: launch.workers=null "
                "launch.nproc=N"
            ),
        ),
        (
            ("sampler.padding=contiguous",),
            "has another order of samples with another number of workers. Type instead: sampler.padding=strided",
        ),
        (("on_nonfinite=rewind",), "on_nonfinite=rewind: "),
    ],
)
def test_what_cannot_be_is_refused(told: tuple[str, ...], why: str) -> None:
    run = ["+recipe=digits_lenet", "tracking=none", "device=cpu", "launch.nnodes=1:4", "launch.nproc=1", *told]
    with pytest.raises(UserError) as refused:
        run_here(run)
    assert why in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_hosts_that_come_leave_and_die_at_random_change_nothing(seed: int, tmp_path: Path) -> None:
    """Every update is done once, as by one process, whatever hosts 1 and 2 do meanwhile."""
    chance = random.Random(seed)
    slow = ("epochs=40", "callbacks=[{_target_:tests.faults.gate.Slow,seconds:0.05}]", "launch.max_restarts=1000")
    done = trainer(*BASE, "epochs=40", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "hosts").mkdir()
    with loopback(tmp_path / "hosts", *ELASTIC, "launch.nnodes=1:3", "launch.join_s=0", *slow) as hosts:
        first, others = hosts.start(0), {1: hosts.start(1), 2: hosts.start(2)}
        happened: list[str] = []
        while first.poll() is None and len(happened) < 25:
            time.sleep(chance.uniform(0, 6))
            number = chance.choice([1, 2])
            if others[number].poll() is not None:
                others[number] = hosts.start(number)
                happened.append(f"{number} comes")
            elif chance.random() < 0.6:
                others[number].send_signal(which := chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT]))
                happened.append(f"{number} leaves by {which.name}")
            else:
                lose_power(others[number])
                happened.append(f"{number} dies")
        assert first.wait(600) == 0, f"{happened}\n{hosts.all_screens()}"
        print(happened, lives(hosts.run))
        assert same(losses(hosts.run), losses(tmp_path / "run"))
