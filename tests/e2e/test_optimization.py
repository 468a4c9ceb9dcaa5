"""What averaged weights, an early stop and scaled rates leave behind, from real command lines with several workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import SMALL, mlflow_runs, points, read, trainer
from trainer.data.sets.digits import Digits
from trainer.data.source import Facts
from trainer.models.lenet import LeNet


def validated(run: Path, weights: str) -> tuple[float, float]:
    """Loss and accuracy of saved weights on the digits' validation samples."""
    from safetensors.torch import load_model

    splits = Digits(val_fraction=0.2, split_seed=0).open(Facts(**read(run / "plan.json")["data"]["facts"]))
    model = LeNet(10, 1, 8)
    load_model(model, str(run / weights))
    images, labels = splits.val.inputs, splits.val.labels  # type: ignore[attr-defined]
    scores = model.eval()((images - splits.mean[0]) / splits.std[0]).detach()  # type: ignore[index]
    return torch.nn.functional.cross_entropy(scores, labels).item(), (scores.argmax(1) == labels).double().mean().item()


@pytest.mark.all
def test_averaged_weights_are_saved_and_the_scaled_rate_is_told(tmp_path: Path) -> None:
    done = trainer(
        *SMALL,
        "execution.log_every=1",
        "epochs=3",
        "launch.nproc=2",
        "ema.decay=0.9",
        "ema.warmup=true",
        "best.metric=val_ema/loss",
        "optimizer.lr_factors={features.*: 0.5}",
        "optimizer.lr_scaling=linear",
        "optimizer.lr_base_batch=32",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.1 = 0.05 x 2, for 64 samples per update" in done.stdout
    assert "[Epoch 2] validation of the averaged weights loss: " in done.stdout
    run = tmp_path / "run"
    result = read(run / "result.json")
    loss, acc1 = validated(run, "model_ema.safetensors")
    assert loss == pytest.approx(result["metrics"]["val_ema/loss"], rel=1e-4)
    assert acc1 == pytest.approx(result["metrics"]["val_ema/acc1"], abs=1e-9)
    assert loss != pytest.approx(result["metrics"]["val/loss"], rel=1e-4)
    best, _ = validated(run, "checkpoints/best.safetensors")
    assert best == pytest.approx(result["best"]["val_ema/loss"], rel=1e-4)
    assert result["ended"] == "all updates done" and max(points(run, "lr")) == pytest.approx(0.1, rel=0.01)
    [tracked] = mlflow_runs(tmp_path)
    assert float(tracked.data.params["lr"]) == 0.1 and tracked.data.params["lr_factor"] == "2.0"
    assert tracked.data.params["optimizer.lr_factors"] == "{'features.*': 0.5}"
    assert tracked.data.metrics["val_ema/acc1"] == pytest.approx(acc1, abs=1e-9)


@pytest.mark.all
@pytest.mark.parametrize("strategy", [pytest.param("collective", marks=pytest.mark.long), "pserver_async"])
def test_a_run_that_gets_no_better_stops_early_on_all_workers_and_says_so(tmp_path: Path, strategy: str) -> None:
    done = trainer(
        "+recipe=digits_lenet",
        "epochs=30",
        f"strategy={strategy}",
        "launch.nproc=2",
        "scheduler=plateau",
        "scheduler.warmup_epochs=0",
        "scheduler.patience=0",
        "scheduler.min_delta=100",
        "scheduler.gamma=0.5",
        "early_stop.metric=val/loss",
        "early_stop.patience=3",
        "early_stop.min_delta=100",
        "tracking=none",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    result = read(run / "result.json")
    assert result["status"] == "done" and read(run / "status.json")["percent"] == 100.0
    assert result["ended"].startswith("early stop at update ") and "val/loss has not fallen" in result["ended"]
    assert done.stdout.count(result["ended"]) == 1, "when it happens"
    for rank in (0, 1):
        log = (run / f"workerlog.{rank}").read_text()
        assert log.count("validation loss") == 4 and "*** early stop at update " in log
    if strategy == "collective":
        assert result["steps"] == 4 * 22
    rates = points(run, "lr")
    assert rates[0] == pytest.approx(0.05) and rates[-1] == pytest.approx(0.05 / 4), "two drops before the last epoch"
