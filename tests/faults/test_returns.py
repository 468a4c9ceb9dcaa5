"""Processes of a parameter-server run are killed: a worker comes back alone, a server takes all back to the newest
checkpoint. All work is done once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoint.test_identity import check_equal
from tests.faults.gate import WAITS
from tests.faults.held_up import held_up
from tests.faults.test_lost import check_curves, member, screen
from tests.ledgers import applied
from tests.pace import wait_for
from tests.runs import points, read, trainer
from tests.zygote import Started
from trainer.checkpoint import store
from trainer.weights.server_files import SINCE, parts_of

BASE = (
    "+recipe=digits_lenet",
    "data.batch_size=8",
    "limit_train_batches=40",
    "limit_val_batches=3",
    "epochs=2",
    "execution.log_every=1",
    "execution.threads=1",
    "optimizer.lr=0.001",
    "launch.nproc=2",
    "launch.servers=2",
    "strategy.ledger=true",
    "strategy.persistables=false",
    "checkpoint.every_steps=8",
    "tracking=none",
    "hydra.run.dir=run",
)
AT = 20
GATE = f"callbacks=[{{{{_target_:tests.faults.gate.Gate,at:{AT},until:go,rank:{{rank}}}}}}]"
MODES = {
    "async": ("strategy=pserver_async", "data.lease_batches=4"),
    "ssp": ("strategy=pserver_ssp", "strategy.staleness=1", "data.lease_batches=4"),
    "geo": ("strategy=pserver_geo", "strategy.k_steps=3", "data.lease_batches=4"),
    "sync": ("strategy=pserver_sync",),
}
WORK = 80
"""Batches of an epoch, over both workers."""


@contextmanager
def at_the_gate(folder: Path, *overrides: str, rank: int = 0) -> Iterator[tuple[Started, Path, list[psutil.Process]]]:
    """A run of which that worker waits in its update ``AT``; there is a checkpoint."""

    def waits(run: Path) -> bool:
        log = run / f"workerlog.{rank}"  # its batches are numbered by epoch, and the other worker may be faster
        there = log.exists() and WAITS in log.read_text()
        return there and any((run / "checkpoints").glob("step-*[0-9]/COMPLETE"))

    with held_up(folder, waits, *BASE, GATE.format(rank=rank), *overrides, ends_s=120) as started:
        yield started


def check_ledgers(run: Path, servers: int = 2, work: int = 2 * WORK) -> None:
    """Every batch of every epoch once, at every server."""
    for server in range(servers):
        found = applied(run / f"ledger.{server}.tsv")
        assert sum(found.values()) == len(found) == work, found.most_common(3)


def noted(run: Path, rank: int) -> dict[str, Any]:
    """What plan.json says of a worker."""
    found: dict[str, Any] = next(
        p for p in read(run / "plan.json")["topology"]["processes"] if (p["role"], p["rank"]) == ("worker", rank)
    )
    return found


def gone_back(told: str, result: dict[str, Any], most: int) -> None:
    """The launcher has told of server 1's death, and of at most so many updates that are done again."""
    assert "ATTENTION: server 1 was killed by SIGKILL" in told
    again = re.search(
        r"restart 1 of 3: all processes are started again, from step-\d+; (\d+) updates? since then (?:is|are) lost "
        r"and done again",
        told,
    )
    assert again and 1 <= int(again[1]) <= most, told
    assert (result["restarts"], result["lost_updates"]) == (1, int(again[1]))
    assert (result["returned"], result["lost_workers"]) == ([], {})


@contextmanager
def server_killed(folder: Path, *options: str) -> Iterator[Path]:
    """A run of which server 1 is killed after a checkpoint, at its end."""
    with at_the_gate(folder, *options) as (process, run, everybody):
        lines = len((run / "ledger.1.tsv").read_text().splitlines())
        before = {one.pid for one in everybody if one.is_running()}
        member(run, "serverlog.1", everybody).kill()
        wait_for(lambda: len(json.loads((run / "lives.json").read_text())) == 2, 60, "the next life begins")
        wait_for(lambda: noted(run, 0)["pid"] not in {0, *before}, 60, "the workers are other processes")
        (run / "go").touch()
    assert process.returncode == 0, screen(folder)
    gone_back(screen(folder), read(run / "result.json"), lines)
    yield run


@pytest.mark.all
@pytest.mark.parametrize("then", ["stop", pytest.param("continue", marks=pytest.mark.long)])
def test_sync_ends_with_the_numbers_of_an_undisturbed_run_when_a_server_is_killed(tmp_path: Path, then: str) -> None:
    (tmp_path / "undisturbed").mkdir()
    options = (*MODES["sync"], f"strategy.on_lost_worker={then}")
    whole = trainer(*BASE, *options, cwd=tmp_path / "undisturbed")
    assert whole.returncode == 0, whole.stderr
    with server_killed(tmp_path, *options) as run:
        check_equal(tmp_path / "undisturbed" / "run", run)


@pytest.mark.all
@pytest.mark.parametrize("mode", ["async", pytest.param("ssp", marks=pytest.mark.long), "geo"])
def test_every_server_has_the_work_of_an_undisturbed_run_when_a_server_is_killed(tmp_path: Path, mode: str) -> None:
    """Without a common step the numbers differ from run to run; the ledgers of two runs have the same batches."""
    (tmp_path / "undisturbed").mkdir()
    whole = trainer(*BASE, *MODES[mode], cwd=tmp_path / "undisturbed")
    assert whole.returncode == 0, whole.stderr
    with server_killed(tmp_path, *MODES[mode]) as run:
        for server in range(2):
            same, disturbed = (applied(r / f"ledger.{server}.tsv") for r in (tmp_path / "undisturbed" / "run", run))
            assert disturbed == same and disturbed.total() == 2 * WORK, disturbed.most_common(3)
        same, disturbed = (read(r / "result.json") for r in (tmp_path / "undisturbed" / "run", run))
        assert disturbed["samples"] == same["samples"]
        check_curves(run)


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "rank"), [pytest.param("async", 1, marks=pytest.mark.long), ("ssp", 1), ("geo", 1), ("async", 0)]
)
def test_worker_that_was_killed_takes_part_again(tmp_path: Path, mode: str, rank: int) -> None:
    with at_the_gate(tmp_path, *MODES[mode], "epochs=3", rank=1 - rank) as (process, run, everybody):
        wait_for(lambda: noted(run, rank)["pid"], 10, "plan.json has its number")
        before = noted(run, rank)
        member(run, f"workerlog.{rank}", everybody).kill()
        log = run / f"workerlog.{rank}"
        wait_for(lambda: "waits to be let in" in log.read_text(), 60, "it is there again")
        (run / "go").touch()
    _, again, since = log.read_text().partition("takes part again after update")
    assert again and ("reports from here on" in since) == (rank == 0)
    assert len(points(run, "val/loss")) == 3, "each validation is told once, by whoever is the first"
    after = noted(run, rank)
    assert after["pid"] not in (0, before["pid"]) and {**after, "pid": before["pid"]} == before
    told, result = screen(tmp_path), read(run / "result.json")
    assert process.returncode == 0, told
    assert f"ATTENTION: worker {rank} was killed by SIGKILL" in told
    assert f"restart 1 of 3: worker {rank} is started again; the others go on meanwhile" in told
    assert (result["restarts"], result["lost_updates"], result["lost_workers"], len(result["returned"])) == (
        1,
        0,
        {},
        1,
    )
    check_ledgers(run, work=3 * WORK)
    assert result["samples"] == 3 * WORK * 8, "also what it had trained before it died"
    check_curves(run)


@pytest.mark.all
@pytest.mark.parametrize("who", ["server", "launcher"])
def test_a_run_whose_checkpoints_are_increments_goes_on_after_a_kill(tmp_path: Path, who: str) -> None:
    gates = (20, 30, 40, 50, 60)
    command = (
        "+recipe=wide_and_deep",
        "data.train_rows=1500",
        "data.val_rows=301",
        "data.hash_size=501",
        "model.hidden=[8]",
        "data.batch_size=16",
        "limit_train_batches=40",
        "limit_val_batches=2",
        "data.lease_batches=4",
        "epochs=2",
        "strategy=pserver_async",
        "strategy._target_=tests.checkpoint.incremental.Async",
        *BASE[BASE.index("execution.log_every=1") :],
        f"callbacks=[{','.join(f'{{_target_:tests.faults.gate.Gate,at:{at},until:go{at},rank:0}}' for at in gates)}]",
    )

    def waits(run: Path) -> bool:
        """At a gate before which increments were written: while one checkpoint is written, the next one is not
        begun."""
        log = run / "workerlog.0"
        at = [gate for gate in gates if not (run / f"go{gate}").exists()]
        if not log.exists() or log.read_text().count(WAITS) <= len(gates) - len(at):
            return False
        newest = store.newest_whole(run / "checkpoints")
        if newest is None or any(path.suffix == ".partial" for path in (run / "checkpoints").iterdir()):
            return False
        if all(SINCE in part.meta for part in parts_of(newest)):
            return True
        (run / f"go{at[0]}").touch()
        return False

    with held_up(tmp_path, waits, *command, ends_s=120) as (process, run, everybody):
        if who == "server":
            member(run, "serverlog.1", everybody).kill()
            wait_for(lambda: len(json.loads((run / "lives.json").read_text())) == 2, 60, "the next life begins")
        else:
            process.kill()
        for gate in gates:
            (run / f"go{gate}").touch()
    if who == "launcher":
        ended = trainer(*command, "resume=auto", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    else:
        assert process.returncode == 0, screen(tmp_path)
        assert re.search(r"restart 1 of 3: all processes are started again, from step-\d+", screen(tmp_path))
    check_ledgers(run)
