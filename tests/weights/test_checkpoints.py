"""mode=eval and mode=predict take a checkpoint, and find what the run found after that update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import trainer as package
from tests.checkpoint import saving
from tests.pictures import image_folder
from trainer.checkpoint import store
from trainer.errors import UserError
from trainer.planning.modes import weights_file
from trainer.weights import checkpoints

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
    recipe = ["+recipe=resnet50_imagefolder", "model=resnet18", f"data.root={images}", "data.image_size=32", "tracking=none", "precision=fp32"]  # fmt: skip
    package.run([*recipe, "max_steps=2", "data.batch_size=4", "checkpoint.every_steps=1", f"hydra.run.dir={run}"])
    looked = [*recipe, "mode=predict", f"predict.input={images}/val"]
    package.run([*looked, f"weights={run}", f"hydra.run.dir={tmp_path}/done"])
    (run / "model.safetensors").unlink()
    package.run([*looked, f"weights={run}", f"hydra.run.dir={tmp_path}/newest"])
    assert (tmp_path / "newest" / "predictions.csv").read_bytes() == (tmp_path / "done" / "predictions.csv").read_bytes()  # fmt: skip
    newest, before = store.found(run / "checkpoints")
    assert [weights_file(path) for path in (run, run / "checkpoints", newest, before)] == [newest, newest, newest, before]  # fmt: skip
    (newest / "worker-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"worker-0\.safetensors: 0 bytes, but \d+ were written"):
        package.run([*looked, f"weights={newest}"])
    assert weights_file(run) == before
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="no whole checkpoint"):
        package.run([*looked, f"weights={run}"])


def test_what_is_no_workers_part_is_refused_with_a_sentence(tmp_path: Path) -> None:
    saving.save(tmp_path, 10)
    with pytest.raises(UserError, match=r"worker-0\.safetensors: it is no worker's part of a checkpoint"):
        package.run([*RECIPE, "mode=eval", f"weights={store.folder_of(tmp_path, 10)}"])


def test_a_checkpoint_of_parameter_servers_is_refused_with_a_sentence(tmp_path: Path) -> None:
    saving.save(tmp_path, 10)
    (store.folder_of(tmp_path, 10) / "server-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"in the parts of its parameter servers, .*Type instead: the run's model\.safetensors"):  # fmt: skip
        checkpoints.read(store.folder_of(tmp_path, 10))
