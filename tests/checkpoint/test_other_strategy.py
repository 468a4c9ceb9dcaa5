"""A run that goes on under another strategy of equal mathematics ends as one that never changed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import runs
from tests.checkpoint.test_identity import DIGITS, EVERYTHING, back_at

CLICKS = (
    "+recipe=wide_and_deep",
    "data.train_rows=1500",
    "data.val_rows=301",
    "data.hash_size=501",
    "model.hidden=[8]",
    "limit_train_batches=7",
    "limit_val_batches=2",
)
ALIKE = ("precision=fp64", "data.batch_size=null", "data.global_batch_size=16", *EVERYTHING, "epochs=2")
WORK = {
    "digits, adamw": (
        *DIGITS,
        "optimizer=adamw",
        "optimizer.weight_decay=0.1",
        "optimizer.lr_factors={classifier: 0.5}",
        "scheduler=cosine",
        "ema.decay=0.9",
    ),
    "digits, momentum, plateau": (
        *DIGITS,
        "optimizer.momentum=0.9",
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.metric=val/loss",
        "strategy.clip_norm=0.5",
    ),
    "clicks, adam": (*CLICKS, "optimizer=adam"),
    "clicks, adagrad": (*CLICKS, "optimizer=adagrad"),
    "clicks, adamw, rowwise": (*CLICKS, "optimizer=adamw", "optimizer.sparse=rowwise_adagrad"),
}
WORKERS = ("strategy=collective", "launch.nproc=2")
ALONE = ("strategy=single", "launch.nproc=1")
SERVERS = ("strategy=pserver_sync", "strategy.slice_above=100", "launch.nproc=2", "launch.servers=2")


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


QUICK = ("clicks, adagrad",)


@pytest.mark.all
@pytest.mark.parametrize(
    "work", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in WORK if name not in QUICK)]
)
@pytest.mark.parametrize(("before", "after"), [(SERVERS, ALONE), (WORKERS, SERVERS)], ids=["alone", "served"])
def test_workers_and_servers_go_on_from_each_other(
    work: str, before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    run(tmp_path, *WORK[work], *ALIKE, *before, "hydra.run.dir=before")
    back_at(tmp_path / "before", 9, tmp_path / "after")
    run(tmp_path, *WORK[work], *ALIKE, *after, "hydra.run.dir=after", "resume=auto")
    for file in ("model.safetensors", "model_ema.safetensors"):
        if (tmp_path / "before" / file).is_file():
            ours, theirs = (load_file(tmp_path / folder / file) for folder in ("before", "after"))
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                np.testing.assert_allclose(theirs[name], value, rtol=0, atol=1e-10, err_msg=name)
