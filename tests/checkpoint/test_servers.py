"""A run with parameter servers in sync that goes on with others of them (with as many: ``test_grid.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.checkpoint.test_identity import DIGITS, EVERYTHING, back_at, lines

CLICKS = (
    "+recipe=wide_and_deep",
    "data.train_rows=1500",
    "data.val_rows=301",
    "data.hash_size=501",
    "model.hidden=[8]",
    "data.batch_size=16",
    "limit_train_batches=7",
    "limit_val_batches=2",
    "execution.log_every=2",
    "data.lease_batches=2",
)


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


@pytest.mark.all
def test_sync_goes_on_with_other_workers_and_servers(tmp_path: Path) -> None:
    command = (
        *DIGITS,
        "strategy=pserver_sync",
        "data.batch_size=null",
        "data.global_batch_size=24",
        "optimizer=adam",
        *EVERYTHING,
    )
    run(tmp_path, *command, "hydra.run.dir=whole", "launch.nproc=2", "launch.servers=2")
    back_at(tmp_path / "whole", 9, tmp_path / "other")
    run(tmp_path, *command, "hydra.run.dir=other", "launch.nproc=3", "launch.servers=1", "resume=auto")
    ours, theirs = (lines(tmp_path / name)[-1] for name in ("whole", "other"))
    assert ours[:2] == theirs[:2] and theirs[2] == pytest.approx(ours[2], rel=1e-3)
