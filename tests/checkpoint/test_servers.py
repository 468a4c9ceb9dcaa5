"""A run with parameter servers that goes on from a checkpoint: one worker bit by bit in every mode, sync also on another
size; with several workers each piece of work is applied once over both lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.checkpoint.test_identity import DIGITS, EVERYTHING, back_at, check_equal, lines

CLICKS = (
    "+recipe=wide_and_deep", "data.train_rows=1500", "data.val_rows=301", "data.hash_size=501", "model.hidden=[8]", "data.batch_size=16", "limit_train_batches=7", "limit_val_batches=2",
    "execution.log_every=2", "data.lease_batches=2",
)  # fmt: skip
MODES = {
    "sync": ("strategy=pserver_sync", "strategy.wire=int8", "strategy.evict_after=3"),
    "async": (
        "strategy=pserver_async",
        "strategy.delay_compensation=0.1",
        "strategy.staleness_power=0.5",
        "strategy.entry.count=2",
    ),
    "ssp": ("strategy=pserver_ssp", "strategy.staleness=0", "optimizer=adam"),
    "geo": ("strategy=pserver_geo", "strategy.k_steps=3", "strategy.overlap=false"),
}
ALONE = {
    **{f"{mode}, clicks": (*CLICKS, *told, "launch.nproc=1") for mode, told in MODES.items()},
    "geo, digits": (*DIGITS, *MODES["geo"], "launch.nproc=1", "optimizer=adam"),
    "async, static work": (*DIGITS, "strategy=pserver_async", "launch.nproc=1", "data.work=static"),
}


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


@pytest.mark.parametrize("case", ALONE)
def test_one_worker_ends_as_if_nothing_had_happened(case: str, tmp_path: Path) -> None:
    command = (*ALONE[case], *EVERYTHING)
    run(tmp_path, *command, "hydra.run.dir=whole")
    for step in (10,):
        back_at(tmp_path / "whole", step, tmp_path / f"from{step}")
        run(tmp_path, *command, f"hydra.run.dir=from{step}", "resume=auto")
        check_equal(tmp_path / "whole", tmp_path / f"from{step}")


def test_sync_goes_on_with_as_many_workers_and_servers_or_others(tmp_path: Path) -> None:
    command = (
        *DIGITS,
        "strategy=pserver_sync",
        "data.batch_size=null",
        "data.global_batch_size=24",
        "optimizer=adam",
        *EVERYTHING,
    )
    run(tmp_path, *command, "hydra.run.dir=whole", "launch.nproc=2", "launch.servers=2")
    back_at(tmp_path / "whole", 9, tmp_path / "same")
    run(tmp_path, *command, "hydra.run.dir=same", "launch.nproc=2", "launch.servers=2", "resume=auto")
    check_equal(tmp_path / "whole", tmp_path / "same")
    back_at(tmp_path / "whole", 9, tmp_path / "other")
    run(tmp_path, *command, "hydra.run.dir=other", "launch.nproc=3", "launch.servers=1", "resume=auto")
    ours, theirs = (lines(tmp_path / name)[-1] for name in ("whole", "other"))
    assert ours[:2] == theirs[:2] and theirs[2] == pytest.approx(ours[2], rel=1e-3)
