"""Runs whose servers write increments have the checkpoints, and go on, as runs whose servers write all."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_identity import EVERYTHING, back_at, check_equal
from tests.checkpoint.test_servers import CLICKS, run
from tests.runs import trainer
from trainer.checkpoint import durable_folder, store
from trainer.weights import checkpoint_weights
from trainer.weights.server_files import SINCE, parts_of

COMMAND = (
    *CLICKS,
    *EVERYTHING,
    "checkpoint.background=true",
    "strategy=pserver_sync",
    "data.batch_size=null",
    "data.global_batch_size=16",
    "strategy.evict_after=5",
    "launch.nproc=2",
    "launch.servers=2",
)
INCREMENTS = "strategy._target_=tests.checkpoint.incremental.Sync"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that are alike but for the increments of one."""
    folder = tmp_path_factory.mktemp("increments")
    run(folder, *COMMAND, INCREMENTS, "hydra.run.dir=increments")
    run(folder, *COMMAND, "hydra.run.dir=full")
    return folder


def of_increments(run_dir: Path) -> list[Path]:
    """The checkpoints of which all parts of servers are increments, the oldest first."""
    found = reversed(store.found(run_dir / "checkpoints"))
    return [folder for folder in found if all(SINCE in part.meta for part in parts_of(folder))]


def take_servers_parts(folder: Path, other: Path) -> None:
    """Give a checkpoint the servers' parts of the other run's: a run with a strategy of its own keeps its number of
    servers."""
    theirs, names = other / "checkpoints" / folder.name, list(durable_folder.files(folder, store.FORMAT))
    for name in [*names, "full-0.safetensors", "full-1.safetensors"]:
        source = folder if name.startswith(("worker", "checkpoint")) else theirs
        durable_folder.write(folder, name, partial(shutil.copy, source / name))
    store.complete(folder, [name for name in names if name != store.ABOUT])
    assert all(SINCE in part.meta for part in parts_of(folder))


def test_each_checkpoint_has_the_same_weights_and_states(runs: Path) -> None:
    found = store.found(runs / "increments" / "checkpoints")
    assert len(found) == 21 and len(of_increments(runs / "increments")) == 15
    assert not of_increments(runs / "full")
    for folder in found:
        other = runs / "full" / "checkpoints" / folder.name
        mine, theirs = checkpoint_weights.read(folder), checkpoint_weights.read(other)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine), folder
        for one, two in zip(parts_of(folder), parts_of(other), strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one), folder


@pytest.mark.all
def test_a_run_goes_on_from_increments_bit_by_bit_and_with_other_servers(runs: Path, tmp_path: Path) -> None:
    step = store.step_of(of_increments(runs / "increments")[len(of_increments(runs / "increments")) // 2].name)
    back_at(runs / "increments", step, tmp_path / "same")
    run(tmp_path, *COMMAND, INCREMENTS, "hydra.run.dir=same", "resume=auto")
    check_equal(runs / "full", tmp_path / "same")
    for name in ("one", "other"):  # on one server, from either
        back_at(runs / "full", step, tmp_path / name)
    take_servers_parts(store.folder_of(tmp_path / "one" / "checkpoints", step), runs / "increments")
    for name in ("one", "other"):
        run(tmp_path, *COMMAND, f"hydra.run.dir={name}", "launch.servers=1", "resume=auto")
    check_equal(tmp_path / "one", tmp_path / "other")


def test_the_commands_read_increments(runs: Path, tmp_path: Path) -> None:
    """Also of a folder that was copied elsewhere, alone."""
    folder = of_increments(runs / "increments")[-1]
    shutil.copytree(folder, tmp_path / folder.name)
    other = runs / "full" / "checkpoints" / folder.name
    told = trainer("diff", str(tmp_path / folder.name), str(other), cwd=tmp_path, module="trainer.checkpoints")
    assert "the same" in told.stdout and "bit by bit" in told.stdout, told.stdout + told.stderr
    told = trainer("verify", str(tmp_path / folder.name), cwd=tmp_path, module="trainer.checkpoints")
    assert told.returncode == 0 and "whole" in told.stdout
    with (tmp_path / folder.name / "full-1.safetensors").open("r+b") as file:
        file.write(b"x")
    told = trainer("verify", str(tmp_path / folder.name), cwd=tmp_path, module="trainer.checkpoints")
    assert told.returncode == 1 and "DAMAGED  full-1.safetensors" in told.stdout
