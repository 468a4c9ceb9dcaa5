"""Several workers that go their own ways, killed at once at some moment: over both lives each piece of work is applied
once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.test_servers import run
from tests.faults.test_ledgers import BASE, EPOCHS, SAMPLES
from tests.ledgers import applied
from tests.pace import wait_for
from tests.runs import alive, family, kill, start
from trainer.checkpoint import store

BATCH = 8
MODES = {
    "async": ("strategy.max_merge_var_num=4", "strategy.send_wait_times=2"),
    "ssp": ("strategy.staleness=1",),
    "geo": ("strategy.k_steps=3",),
    "async, static": ("data.work=static",),
}


@pytest.mark.all
@pytest.mark.parametrize(
    "case", [*list(MODES)[::2], *(pytest.param(case, marks=pytest.mark.long) for case in list(MODES)[1::2])]
)
def test_each_batch_is_applied_once_over_both_lives(case: str, tmp_path: Path) -> None:
    draw, servers = random.Random(case), 2
    command = (
        *BASE,
        f"strategy=pserver_{case.partition(',')[0]}",
        "launch.workers=3",
        f"launch.servers={servers}",
        "checkpoint.every_steps=7",
        f"data.batch_size={BATCH}",
        *MODES[case],
    )
    process, checkpoints = start(*command, cwd=tmp_path), tmp_path / "run" / "checkpoints"
    wanted, everybody = draw.randint(1, 4), []
    try:

        def saved() -> bool:
            assert process.poll() is None, (tmp_path / "screen.txt").read_text()[-3000:]
            found = store.found(checkpoints)
            return bool(found) and int(found[0].name[5:]) >= 7 * wanted

        wait_for(saved, 300, "a checkpoint")
        everybody = family(process.pid)
    finally:
        kill(everybody)
        process.kill()
        process.wait(60)
    wait_for(lambda: not alive(everybody), 60, "all are gone")
    run(tmp_path, *command, "resume=auto")
    assert "goes on from" in (tmp_path / "run" / "workerlog.0").read_text()
    if "static" in case:
        return
    for server in range(servers):
        found = applied(tmp_path / "run" / f"ledger.{server}.tsv")
        assert sum(found.values()) == len(found) == EPOCHS * (SAMPLES // BATCH), found.most_common(3)
