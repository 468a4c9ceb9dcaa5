"""A run goes on with another number of workers: the same samples in the same updates, whoever computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import runs
from tests.checkpoint.test_identity import back_at, lines

DIGITS = (
    "+recipe=digits_lenet",
    "data.global_batch_size=32",
    "limit_train_batches=7",
    "limit_val_batches=3",
    "execution.log_every=2",
    "precision=fp64",
    "epochs=3",
    "tracking=none",
    "execution.threads=1",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=100",
    "checkpoint.background=false",
    "verbosity=quiet",
    "optimizer.momentum=0.9",
)
SIZES = {1: ("launch.nproc=1", "strategy=single"), 2: ("launch.nproc=2",), 4: ("launch.nproc=4",)}


@pytest.mark.all
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_a_run_goes_on_with_more_or_fewer_workers(before: int, after: int, tmp_path: Path) -> None:
    ended = runs.trainer(*DIGITS, *SIZES[before], "hydra.run.dir=whole", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    back_at(tmp_path / "whole", 10, tmp_path / "other")
    ended = runs.trainer(*DIGITS, *SIZES[after], "hydra.run.dir=other", "resume=auto", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    one, other = lines(tmp_path / "whole"), lines(tmp_path / "other")
    assert [(step, epoch, sorted(values)) for step, epoch, values in one] == [
        (step, epoch, sorted(values)) for step, epoch, values in other
    ]
    for (_, _, ours), (_, _, theirs) in zip(one, other, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    weights, others = (
        load_file(tmp_path / "whole" / "model.safetensors"),
        load_file(tmp_path / "other" / "model.safetensors"),
    )
    assert max((weights[name] - others[name]).abs().max() for name in weights) < 1e-12
    assert (
        runs.read(tmp_path / "other" / "result.json")["samples"]
        == runs.read(tmp_path / "whole" / "result.json")["samples"]
    )
