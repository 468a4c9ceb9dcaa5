"""mode=eval and mode=predict take a checkpoint, and find what the run found after that update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer as package
from tests import runs
from tests.checkpoint import saving
from tests.pictures import image_folder
from trainer.checkpoint import store
from trainer.checkpoints import main
from trainer.errors import UserError
from trainer.planning.eval_and_predict import weights_file
from trainer.weights import checkpoint_weights, server_files

RECIPE = ["+recipe=digits_lenet", "tracking=none", "limit_train_batches=8"]
RUNS = {
    "single": ["epochs=2", "execution.val_every_steps=5", "checkpoint.every_steps=5", "ema.decay=0.9"],
    "local_sgd of two": ["epochs=1", "strategy=local_sgd", "strategy.k_steps=3", "launch.nproc=2"],
}


def validations(run: Path) -> dict[int, dict[str, float]]:
    """By update."""
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        point["step"]: {k: v for k, v in point["metrics"].items() if k.startswith("val/")}
        for point in points
        if "val/loss" in point["metrics"]
    }


@pytest.mark.parametrize("name", RUNS)
def test_eval_of_a_checkpoint_gives_the_numbers_of_the_runs_own_validation(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    package.run([*RECIPE, *RUNS[name], "checkpoint.keep_last=9", f"hydra.run.dir={run}"])
    found = {store.about(folder).step: folder for folder in store.found(run / "checkpoints")}
    wanted = validations(run)
    assert found.keys() <= wanted.keys() and len(found) >= (3 if name == "single" else 1)
    for step in sorted(found)[:3]:
        nproc = [
            key for key in RUNS[name] if key.startswith("launch")
        ]  # with other batches the mean is rounded otherwise
        result = package.run(
            [*RECIPE, *nproc, "mode=eval", f"weights={found[step]}", f"hydra.run.dir={tmp_path}/at-{step}"]
        )
        assert {k: v for k, v in result.metrics.items() if k.startswith("val/")} == wanted[step]


def test_a_run_that_has_only_checkpoints_is_taken_by_its_newest_whole_one(tmp_path: Path) -> None:
    run, images = tmp_path / "run", image_folder(tmp_path / "images")
    recipe = [
        "+recipe=resnet50_imagefolder",
        "model=convnet",
        "~model.zero_init_residual",
        f"data.root={images}",
        "data.image_size=32",
        "tracking=none",
        "precision=fp32",
    ]
    package.run([*recipe, "max_steps=2", "data.batch_size=4", "checkpoint.every_steps=1", f"hydra.run.dir={run}"])
    looked = [*recipe, "mode=predict", f"predict.input={images}/val"]
    package.run([*looked, f"weights={run}", f"hydra.run.dir={tmp_path}/done"])
    (run / "model.safetensors").unlink()
    package.run([*looked, f"weights={run}", f"hydra.run.dir={tmp_path}/newest"])
    assert (tmp_path / "newest" / "predictions.csv").read_bytes() == (
        tmp_path / "done" / "predictions.csv"
    ).read_bytes()
    newest, before = store.found(run / "checkpoints")
    assert [weights_file(path) for path in (run, run / "checkpoints", newest, before)] == [
        newest,
        newest,
        newest,
        before,
    ]
    (newest / "worker-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"worker-0\.safetensors: 0 bytes, but \d+ were written"):
        package.run([*looked, f"weights={newest}"])
    assert weights_file(run) == before
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="no whole checkpoint"):
        package.run([*looked, f"weights={run}"])


def test_persistables_are_no_weights_and_the_run_that_has_them_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    package.run([*CLICKS, "max_steps=1", "launch.nproc=1", "launch.servers=1", f"hydra.run.dir={run}"])
    with pytest.raises(UserError, match=rf"this folder has persistables, .*Type instead: weights={run}$"):
        weights_file(run / "checkpoints" / "persistables")
    shutil.move(run / "checkpoints" / "persistables", tmp_path / "away" / "persistables")
    with pytest.raises(UserError, match=r"Type instead: weights=RUN$"):
        weights_file(tmp_path / "away" / "persistables")


def test_what_is_no_workers_part_is_refused_with_a_sentence(tmp_path: Path) -> None:
    saving.save(tmp_path, 10)
    with pytest.raises(UserError, match=r"worker-0\.safetensors: it is no worker's part of a checkpoint"):
        package.run([*RECIPE, "mode=eval", f"weights={store.folder_of(tmp_path, 10)}"])


CLICKS = """
    +recipe=wide_and_deep tracking=none data.train_rows=1500 data.val_rows=301 data.hash_size=501 model.hidden=[8]
    data.batch_size=16 strategy.slice_above=100 checkpoint.background=false
""".split()
"""Most rows of the tables are touched by no batch, and one dense parameter is cut over all servers."""
SERVED = {
    "sync": ["strategy=pserver_sync", "launch.nproc=2", "launch.servers=2", "optimizer=adam"],
    "async": ["strategy=pserver_async", "launch.nproc=1", "launch.servers=3"],
    "ssp": ["strategy=pserver_ssp", "launch.nproc=1", "launch.servers=2", "strategy.entry.count=2"],
    "geo": ["strategy=pserver_geo", "strategy.k_steps=3", "launch.nproc=2", "launch.servers=1"],
}


@pytest.mark.all
@pytest.mark.parametrize("mode", ["sync", "async", pytest.param("ssp", marks=pytest.mark.long), "geo"])
def test_parts_of_servers_make_the_weights_that_the_run_leaves(mode: str, tmp_path: Path) -> None:
    command = (
        *CLICKS,
        *SERVED[mode],
        *"epochs=2 limit_train_batches=6 checkpoint.every_epochs=1 hydra.run.dir=run".split(),
    )
    ended = runs.trainer(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    wanted, best = (
        load_file(tmp_path / "run" / name) for name in ("model.safetensors", "checkpoints/best.safetensors")
    )
    newest = store.newest_whole(tmp_path / "run" / "checkpoints")
    assert newest is not None and (newest / "server-0.safetensors").is_file()
    made = checkpoint_weights.read(newest)
    assert {
        name for name in wanted if not torch.equal(made[name], wanted[name])
    } == set() and made.keys() == wanted.keys()
    watched = max((store.about(f).watched.worth, f) for f in store.found(tmp_path / "run" / "checkpoints"))[1]
    made = checkpoint_weights.read(watched)
    assert {name for name in best if not torch.equal(made[name], best[name])} == set()


def test_a_checkpoint_of_servers_is_evaluated_exported_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = (
        *CLICKS,
        *SERVED["sync"],
        *"""
            epochs=1 limit_train_batches=6 execution.val_every_steps=3 checkpoint.every_steps=3
            checkpoint.keep_last=9
        """.split(),
    )
    ended = runs.trainer(*command, "hydra.run.dir=run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    wanted = validations(run)
    found = {store.about(folder).step: folder for folder in store.found(run / "checkpoints")}
    assert found.keys() == wanted.keys() == {3, 6}
    result = package.run([*CLICKS[:-2], "mode=eval", f"weights={found[3]}", f"hydra.run.dir={tmp_path}/at-3"])
    for name, value in wanted[3].items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-6)
    for kind in ("safetensors", "pt", "pt2"):
        assert main(["export", str(run), str(tmp_path / f"m.{kind}")]) == 0
    assert (tmp_path / "m.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["diff", str(found[3]), str(found[6])]) == 0
    shown = capsys.readouterr().out
    one, other = (checkpoint_weights.read(found[step]) for step in (3, 6))
    table = next(name for name in one if len(one[name]) > 400)
    assert f"{(one[table].double() - other[table].double()).abs().max().item():.4g} at most" in shown


def test_parts_of_servers_that_make_no_model_are_refused_with_a_sentence(tmp_path: Path) -> None:
    model = {"a": torch.zeros(4), "t.weight": torch.zeros(0, 2)}

    def parts(tables: dict[str, Any], **tensors: torch.Tensor) -> None:
        save_file(tensors, tmp_path / "server-0.safetensors", metadata={"meta": json.dumps({"tables": tables})})

    table = {
        "dim": 2,
        "dtype": "float32",
        "num_rows": 3,
        "kernel": "adam",
        "rows": 1,
        "init": "zeros",
        "scale": 0.0,
        "seed": 0,
    }
    rows = {"table|t|ids": torch.tensor([2]), "table|t|rows": torch.ones(1, 4)}
    parts({"t": table}, **{"dense|a|0": torch.ones(4)}, **rows)
    made = server_files.parameters(tmp_path, model)
    assert made["a"].tolist() == [1] * 4 and made["t.weight"].tolist() == [[0, 0], [0, 0], [1, 1]]
    for wrong, tensors, said in (
        ({}, {"dense|a|0": torch.ones(3)}, "pieces are missing"),
        ({}, {"dense|b|0": torch.ones(3)}, "KeyError"),
        ({"t": {**table, "num_rows": None}}, rows, "takes any id"),
        ({"t": table}, {**rows, "table|t|ids": torch.tensor([3])}, "cannot be put together"),
        ({"t": {**table, "dim": 9}}, rows, "cannot be put together"),
    ):
        parts(wrong, **tensors)
        with pytest.raises(UserError, match=said):
            server_files.parameters(tmp_path, model)
    (tmp_path / "server-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be put together"):
        server_files.parameters(tmp_path, model)
