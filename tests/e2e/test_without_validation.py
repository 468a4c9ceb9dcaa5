"""validation=false: the same training without a look at validation samples, of which there need be none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

import trainer as package
from tests.runs import SMALL, points, read, trainer
from trainer.errors import UserError

OWN = (
    *SMALL,
    "~data.val_fraction",
    "~data.split_seed",
    "~data.max_pixels",
    "~data.max_file_mib",
    "data._target_=tests.e2e.own_data.TrainingAlone",
    "data.batch_size=8",
    "tracking=none",
)


@pytest.mark.all
def test_the_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    kept, without = tmp_path / "with", tmp_path / "without"
    told = [*SMALL, "epochs=2", "ema.decay=0.9", "execution.log_every=4", "tracking=none"]
    package.run([*told, f"hydra.run.dir={kept}"])
    package.run([*told, f"hydra.run.dir={without}", "validation=false"])
    assert points(kept, "train/loss") == points(without, "train/loss")
    for name in ("model.safetensors", "model_ema.safetensors"):
        mine, other = load_file(kept / name), load_file(without / name)
        assert all(torch.equal(mine[key], other[key]) for key in other) and mine.keys() == other.keys()
    told_of = read(without / "result.json")
    assert told_of["validation"] is False and told_of["best"] == {} and told_of["best_step"] == 0
    assert read(kept / "result.json")["validation"] is True
    assert not [name for name in told_of["metrics"] if name.startswith("val")] and not points(without, "val/loss")
    assert not (without / "checkpoints" / "best.safetensors").exists() and (without / "curves.png").stat().st_size


@pytest.mark.all
def test_the_model_at_the_end_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracked = (f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "tracking.log_last_model=true")
    told = [*SMALL, *tracked, "tracking.flush_timeout_s=600", "validation=false", "max_steps=2"]
    result = package.run([*told, f"hydra.run.dir={tmp_path}/run"])
    [model] = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_logged_models([result.experiment_id])
    assert model.name == "digits_lenet-last" and model.tags["trainer.which"] == "last"
    assert "validation none (validation=false)" in " ".join(capsys.readouterr().out.split())


def test_two_workers_train_on_data_without_validation_samples(tmp_path: Path) -> None:
    done = trainer(*OWN, "launch.nproc=2", "validation=false", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(not validated: validation=false)" in done.stdout and "validation loss" not in done.stdout
    assert read(tmp_path / "run/result.json")["samples"] == 64
    assert (tmp_path / "run/model.json").is_file() and (tmp_path / "run/example.npz").is_file()


def test_data_without_validation_samples_are_refused_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there are no validation samples.*validation=false"):
        package.run([*OWN, f"hydra.run.dir={tmp_path}/run"])
    assert not (tmp_path / "run").exists()


@pytest.mark.all
def test_a_callback_ends_workers_that_have_no_common_step(tmp_path: Path) -> None:
    recorder = "callbacks=[{_target_:tests.e2e.own_callbacks.Recorder,stop_at:2}]"
    done = trainer(
        *SMALL,
        "epochs=1000",
        "limit_train_batches=8",
        "data.work=static",
        "strategy=pserver_async",
        "launch.workers=2",
        recorder,
        "validation=false",
        "checkpoint=none",
        "tracking=none",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = read(tmp_path / "run/result.json")
    assert "worker 1 has seen enough" in result["ended"] and result["steps"] == 8
