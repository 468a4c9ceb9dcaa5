"""Processes of a parameter-server run are killed and come back: all work is done once, and what was lost is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.held_up import held_up
from tests.faults.test_ledgers import applied
from tests.faults.test_lost import member, screen
from tests.pace import wait_for
from tests.runs import points, read
from tests.zygote import Started

BASE = (
    "+recipe=digits_lenet", "data.batch_size=8", "limit_train_batches=40", "limit_val_batches=3", "epochs=2", "execution.log_every=1",
    "execution.threads=1", "optimizer.lr=0.001", "launch.nproc=2", "launch.servers=2", "strategy.ledger=true",
    "strategy.persistables=false", "checkpoint.every_steps=8", "tracking=none", "hydra.run.dir=run",
)  # fmt: skip
AT = 20
GATE = f"callbacks=[{{_target_:tests.faults.gate.Gate,at:{AT},until:go,rank:0}}]"
MODES = {
    "async": ("strategy=pserver_async", "data.lease_batches=4"),
    "ssp": ("strategy=pserver_ssp", "strategy.staleness=1", "data.lease_batches=4"),
    "geo": ("strategy=pserver_geo", "strategy.k_steps=3", "data.lease_batches=4"),
    "sync": ("strategy=pserver_sync",),
}
WORK = 80
"""Batches of an epoch, over both workers."""


@contextmanager
def at_the_gate(folder: Path, *overrides: str) -> Iterator[tuple[Started, Path, list[psutil.Process]]]:
    """A run whose first worker waits in its update ``AT``; a checkpoint is there."""

    def waits(run: Path) -> bool:
        there = (run / "metrics.jsonl").exists() and len(points(run, "train/loss")) >= AT
        return there and any((run / "checkpoints").glob("step-*[0-9]/COMPLETE"))

    with held_up(folder, waits, *BASE, GATE, *overrides, ends_s=120) as started:
        yield started


def check_ledgers(run: Path, servers: int = 2) -> None:
    """Every batch of every epoch once, at every server."""
    for server in range(servers):
        found = applied(run / f"ledger.{server}.tsv")
        assert sum(found.values()) == len(found) == 2 * WORK, found.most_common(3)


@pytest.mark.parametrize("mode", MODES)
def test_all_go_back_to_the_checkpoint_when_a_server_is_killed(tmp_path: Path, mode: str) -> None:
    with at_the_gate(tmp_path, *MODES[mode]) as (process, run, everybody):
        lines = len((run / "ledger.1.tsv").read_text().splitlines())
        member(run, "serverlog.1", everybody).kill()
        wait_for(lambda: len(json.loads((run / "lives.json").read_text())) == 2, 60, "the next life begins")
        (run / "go").touch()
    told, result = screen(tmp_path), read(run / "result.json")
    assert process.returncode == 0, told
    assert "ATTENTION: server 1 was killed by SIGKILL" in told
    again = re.search(r"restart 1 of 3: all processes are started again, from step-\d+; (\d+) updates since then are lost and done again", told)  # fmt: skip
    assert again and 1 <= int(again[1]) <= lines
    assert (result["restarts"], result["lost_updates"], result["lost_workers"]) == (1, int(again[1]), {})
    if mode != "sync":
        check_ledgers(run)
