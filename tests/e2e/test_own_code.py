"""A user's callbacks and metrics, as docs/callbacks-and-metrics.md describes them, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from sklearn import metrics as truth

import trainer as package
from tests.pages import write_files
from tests.runs import mlflow_runs, points, read, trainer
from trainer.data.sets.digits import MEAN, STD, Digits
from trainer.data.source import Facts
from trainer.errors import RunFailed, UserError
from trainer.models.lenet import LeNet
from trainer.worker.callbacks import made

PAGE = "callbacks-and-metrics.md"
DIGITS = ["+recipe=digits_lenet", "tracking=none", "precision=fp32"]
RECORDER = "callbacks=[{_target_:tests.e2e.own_callbacks.Recorder,stop_at:%s}]"


def events(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"events.{rank}").read_text().splitlines()]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The page's files in an empty folder, and its first command there; what it printed."""
    folder = tmp_path_factory.mktemp("page")
    names = write_files(PAGE, folder)
    assert names == ["mine/recipe/watched_digits.yaml", "my_package/metrics.py", "my_package/callbacks.py"]
    done = trainer(
        "--config-dir",
        "mine",
        "+recipe=watched_digits",
        "hydra.run.dir=run",
        "precision=fp32",
        "tracking.log_model=false",
        cwd=folder,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@torch.no_grad()
def measured(weights: Path) -> dict[str, float]:
    """The page's metrics of the validation samples, by torch and scikit-learn alone."""
    model = LeNet(10, 1, 8)
    load_model(model, str(weights))
    val: Any = Digits(val_fraction=0.2, split_seed=0).open(Facts("", "", 1438, 359, (1, 8, 8), 10)).val
    likely = model.eval()((val.inputs - MEAN[0]) / STD[0]).softmax(1)
    f1 = truth.f1_score(val.labels, likely.argmax(1), average="weighted")
    return {"val/f1w": float(f1), "val/confidence": float(likely.amax(1).double().mean())}


@pytest.mark.all
def test_the_pages_example_runs_as_it_stands(followed: tuple[Path, str]) -> None:
    folder, said = followed
    run, result = folder / "run", read(folder / "run" / "result.json")
    notes = [json.loads(line) for line in (run / "notes.0.jsonl").read_text().splitlines()]
    validations = [note["metrics"] for note in notes if note["what"] == "validation"]
    assert [note["what"] for note in notes if note["what"] != "update"] == [
        "start",
        *["validation"] * len(validations),
        "end",
    ]
    assert [v["val/f1w"] for v in validations] == points(run, "val/f1w")
    assert all(v["val/f1w"] < 0.9 for v in validations[:-1])
    ended = notes[-1]["ended"]
    if validations[-1]["val/f1w"] >= 0.9:
        updates = read(run / "plan.json")["length"]["steps_per_epoch"] * len(validations)
        assert ended == f"stopped by a callback at update {updates}: val/f1w has reached 0.9"
        assert result["ended"] == ended and ended in said
    assert {k: result["metrics"][k] for k in ("val/f1w", "val/confidence")} == pytest.approx(
        measured(run / "model.safetensors"), abs=1e-6
    )
    assert result["best"]["val/f1w"] == max(points(run, "val/f1w"))
    line = f"f1w: {validations[-1]['val/f1w']:.5f}, confidence: {validations[-1]['val/confidence']:.5f}"
    assert line in said and "best val/f1w in checkpoints/best.safetensors" in " ".join(said.split())
    [tracked] = mlflow_runs(folder)
    assert tracked.data.metrics["val/f1w"] == pytest.approx(validations[-1]["val/f1w"])
    assert tracked.data.tags.get("trainer.ended", "") == ended


@pytest.mark.all
@pytest.mark.parametrize("workers", [2])  # one worker: above; other shares: tests/metrics/test_user_metrics.py
def test_own_metrics_are_equal_for_every_number_of_workers(
    followed: tuple[Path, str], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = followed
    monkeypatch.syspath_prepend(str(folder))
    own = [
        "metrics.f1w._target_=torchmetrics.classification.MulticlassF1Score",
        "metrics.f1w.num_classes=10",
        "metrics.f1w.average=weighted",
    ]
    result = package.run(
        [
            *DIGITS,
            *own,
            "metrics.confidence._target_=my_package.metrics.Confidence",
            RECORDER % "null",
            "mode=eval",
            f"weights={folder}/run",
            f"launch.nproc={workers}",
            "data.val_batch_size=50",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    expected = measured(folder / "run" / "model.safetensors")
    assert {k: result.metrics[k] for k in expected} == pytest.approx(expected, abs=1e-6)
    for rank in range(workers):
        [told] = events(tmp_path / "run", rank)
        assert told["what"] == "validation" and told["metrics"] == result.metrics, "nothing else is called"


def test_every_worker_is_told_in_order_and_all_stop_together(tmp_path: Path) -> None:
    result = package.run(
        [
            *DIGITS,
            RECORDER % 13,
            "launch.nproc=2",
            "epochs=3",
            "execution.log_every=5",
            "data.batch_size=32",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    stopped = "stopped by a callback at update 16: worker 1 has seen enough"  # the line after batch 15 is update 16's
    assert result.status == "done" and result.steps == 16 and result.ended == stopped
    assert "val/acc1" in result.metrics, "what ends is validated"
    for rank in range(2):
        told = events(tmp_path / "run", rank)
        assert [e["what"] for e in told] == ["start", *["update"] * 16, "validation", "end"]
        assert [e["step"] for e in told] == [0, *range(1, 17), 16, 16]
        assert {(e["rank"], e["world_size"], e["total_steps"], e["epoch"]) for e in told} == {(rank, 2, 66, 0)}
        assert {e["samples"] for e in told if e["what"] == "update"} == {32}
        assert told[-2]["improved"] == (rank == 0) and told[-1]["ended"] == stopped
        assert (
            {f"val/{k}": v for k, v in told[-1]["metrics"].items()}
            == told[-2]["metrics"]
            == {k: v for k, v in result.metrics.items() if k.startswith("val/")}
        )
    rates = [[e["lr"] for e in events(tmp_path / "run", rank)] for rank in range(2)]
    assert rates[0] == rates[1] and rates[0][5] > rates[0][1] > 0
    losses = [[e["loss"] for e in events(tmp_path / "run", rank) if e["what"] == "update"] for rank in range(2)]
    assert points(tmp_path / "run", "train/loss")[0] == pytest.approx(np.mean([losses[0][0], losses[1][0]]), abs=1e-6)


@pytest.mark.all
def test_workers_out_of_step_stop_at_the_next_validation(tmp_path: Path) -> None:
    result = package.run(
        [
            *DIGITS,
            RECORDER % 1,
            "strategy=pserver_async",
            "launch.servers=1",
            "launch.workers=2",
            "epochs=3",
            "limit_train_batches=20",
            "metrics.own._target_=tests.metrics.test_user_metrics.Right",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    told = [events(tmp_path / "run", rank) for rank in range(2)]
    assert result.ended.startswith("stopped by a callback at update ") and result.ended.endswith(
        ": worker 1 has seen enough"
    )
    for mine in told:
        assert [e["what"] for e in mine if e["what"] != "update"] == ["start", "validation", "end"]
        assert mine[-2]["metrics"] == told[0][-2]["metrics"]
    assert sum(e["what"] == "update" for mine in told for e in mine) == 40, "the epoch's work is done, and no more"
    assert told[0][-2]["metrics"]["val/own"] == pytest.approx(told[0][-2]["metrics"]["val/acc1"])


def test_a_callback_that_breaks_ends_the_run_with_its_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        package.run([*DIGITS, "callbacks=[{_target_:tests.e2e.own_callbacks.Broken}]", f"hydra.run.dir={tmp_path}/run"])
    first, *rest = str(failed.value).splitlines()
    line = 1 + (Path(__file__).parent / "own_callbacks.py").read_text().splitlines().index("        return 1 / by")
    assert first == (
        f"callbacks[0] (tests.e2e.own_callbacks.Broken) broke in on_update_end, "
        f"{Path(__file__).parent}/own_callbacks.py:{line}: ZeroDivisionError: division by zero"
    )
    assert rest[0].startswith("Traceback") and rest[-1] == "ZeroDivisionError: division by zero"
    assert "trainer/worker/callbacks.py" not in str(failed.value)
    assert [e["what"] for e in events(tmp_path / "run", 0)] == ["start", "exception"]
    assert events(tmp_path / "run", 0)[-1]["error"] == str(failed.value)
    assert read(tmp_path / "run" / "result.json")["status"] == "failed"


BAD = {
    "callbacks=[{_target_:tests.e2e.own_callbacks.Misnamed}]": (
        r"callbacks\[0\] \(.*Misnamed\): on_epoch_end would never be called; there are on_train_start, .*Type "
        r"instead: on_\w+"
    ),
    "callbacks=[{_target_:tests.e2e.own_callbacks.Idle}]": r"callbacks\[0\] \(.*Idle\): has none of on_train_start",
    "callbacks=[{_target_:tests.e2e.own_callbacks.Recorder,stop:1}]": (
        r"callbacks\[0\]\.stop: .*takes no such argument; it takes stop_at\. Type instead: "
        r"stop_at: 1"
    ),
    "callbacks=[{_target_:tests.e2e.own_callbacks.Recordr}]": r"callbacks\[0\]\._target_=.*has no 'Recordr'",
    "callbacks=[3]": r"callbacks\[0\]=3: must be a mapping with a _target_",
    "metrics.acc1._target_=tests.metrics.test_user_metrics.Right": r"metrics\.acc1: is measured anyway, as val/acc1",
    "metrics.own._target_=tests.metrics.test_user_metrics.NoSums": r"does not say how the workers' parts are put",
    "metrics={own:3}": r"metrics\.own=3: must be a mapping with a _target_",
    "early_stop.metric=val/own": (
        r"early_stop\.metric=val/own: a validation here measures val/loss, val/acc1, val/acc5, "
        r"val/f1\."
    ),
}


@pytest.mark.parametrize("override", BAD)
def test_what_cannot_be_called_is_refused_before_anything_starts(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=BAD[override]):
        package.run([*DIGITS, override])
    assert not list(tmp_path.iterdir())


def test_own_metrics_can_be_watched_and_say_which_way_is_better(tmp_path: Path) -> None:
    ece = ["metrics.ece._target_=torchmetrics.classification.MulticlassCalibrationError", "metrics.ece.num_classes=10"]
    result = package.run(
        [
            *DIGITS,
            *ece,
            "best.metric=val/ece",
            "early_stop.metric=val_ema/ece",
            "ema.decay=0.5",
            "scheduler=plateau",
            "scheduler.metric=val/ece",
            "epochs=2",
            "limit_train_batches=5",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    measured = points(tmp_path / "run", "val/ece")
    assert len(measured) == len(points(tmp_path / "run", "val_ema/ece")) == 2
    assert result.best["val/ece"] == min(measured) and result.best_step == 5 * (1 + measured.index(min(measured)))


def test_without_callbacks_there_is_nothing_to_call(tmp_path: Path) -> None:
    assert made([], 0, 1, tmp_path, 1, torch.nn.Identity()) is None
