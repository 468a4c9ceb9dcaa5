"""Numbers and sets of labels, from the data to the predictions: with 1 and 2 workers, resumed, evaluated, refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runs import read, trainer
from tests.tasks.squares import VAL, drawn
from trainer.cli.arguments import typed_keys
from trainer.cli.commands import plain
from trainer.cli.compose import compose, hydra_app
from trainer.errors import UserError
from trainer.job.check import get_ready
from trainer.tasks.regression import Regression

HERE = Path(__file__).parent
RUN = [
    *("--config-dir", str(HERE / "conf"), "model=lenet", "model.image_size=8", "data=squares", "optimizer=adam"),
    *("data.global_batch_size=80", "optimizer.lr=0.003", "tracking=none", "precision=fp64", "epochs=3"),
    *("execution.log_every=2", "checkpoint.every_steps=3", "checkpoint.keep_last=99"),
]
MEASURED = {"place": ("mae", "rmse", "r2"), "traits": ("f1", "f1_micro", "exact", "map")}
PICTURES = {"place": ("scatter.png", "mistakes.csv"), "traits": ("labels.png", "per_label.csv")}


def run(folder: Path, *overrides: str, code: int = 0) -> str:
    done = trainer(*RUN, *overrides, f"hydra.run.dir={folder}", cwd=HERE.parents[1], pictures=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def measured(folder: Path) -> list[dict[str, float]]:
    """What the run has reported, without what depends on the clock."""
    points = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [{k: v for k, v in point.items() if k.startswith(("train/", "val/"))} for point in points]
    return [point for point in found if point]


def validated(folder: Path) -> dict[str, float]:
    """The metrics of the run's last validation."""
    return {name: value for name, value in read(folder / "result.json")["metrics"].items() if name.startswith("val/")}


@pytest.fixture(scope="module", params=["place", "traits"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """The labels, the folder of a run with one worker, and what it printed."""
    folder = tmp_path_factory.mktemp("run") / request.param
    return request.param, folder, run(folder, f"data.labels={request.param}", "launch.nproc=1")


@pytest.mark.all
def test_the_plan_names_the_task_and_its_loss_and_the_run_measures_its_metrics(trained: tuple[str, Path, str]) -> None:
    labels, folder, shown = trained
    task, loss = {"place": ("regression", "MSELoss"), "traits": ("multi_label", "BCEWithLogitsLoss")}[labels]
    assert f"{task}  (auto: from the data)" in shown and read(folder / "plan.json")["objective"]["loss"] == (
        f"torch.nn.{loss} (of task={task})"
    )
    result = read(folder / "result.json")
    assert validated(folder).keys() == {f"val/{name}" for name in ("loss", *MEASURED[labels])}
    assert all((folder / name).is_file() for name in PICTURES[labels])
    best = {"place": "rmse", "traits": "map"}[labels]
    values = [point[f"val/{best}"] for point in measured(folder) if f"val/{best}" in point]
    assert result["best"][f"val/{best}"] == (min if best == "rmse" else max)(values)


@pytest.mark.all
def test_two_workers_and_a_resumed_run_report_the_same(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    labels, folder, _ = trained
    two, resumed = tmp_path / "two", tmp_path / "resumed"
    run(two, f"data.labels={labels}", "launch.nproc=2")
    shutil.copytree(folder, tmp_path / "begun")
    checkpoint = tmp_path / "begun" / "checkpoints" / "step-000000006"
    run(resumed, f"data.labels={labels}", "launch.nproc=1", f"resume={checkpoint}")
    one = measured(folder)
    for other, points in ((two, one), (resumed, one[-len(measured(resumed)) :])):
        assert len(measured(other)) == len(points) > 3
        for before, now in zip(points, measured(other), strict=True):
            assert now == pytest.approx(before, rel=1e-9, abs=1e-12)


@pytest.mark.all
def test_eval_measures_what_the_run_measured(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    _, folder, _ = trained
    done = trainer("eval", str(folder), f"hydra.run.dir={tmp_path / 'e'}", cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert validated(tmp_path / "e") == pytest.approx(validated(folder))


def test_predict_writes_numbers_or_the_names_of_a_set(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    labels, folder, _ = trained
    images, wanted = drawn(VAL, 1, labels).tensors
    (tmp_path / "images").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(tmp_path / "images" / f"{number:03d}.png")
    out = tmp_path / "out.csv"
    typed = (f"predict.output={out}", "launch.nproc=2", f"hydra.run.dir={tmp_path / 'p'}")
    done = trainer("predict", str(folder), str(tmp_path / "images"), *typed, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == VAL
    metrics = read(folder / "result.json")["metrics"]
    if labels == "place":
        assert list(rows[0]) == ["file", "row", "column", "error"]
        found = np.array([[float(row["row"]), float(row["column"])] for row in rows])
        assert np.sqrt(((found - wanted.numpy()) ** 2).mean()) == pytest.approx(metrics["val/rmse"], rel=1e-6)
        return
    assert list(rows[0]) == ["file", "labels", "upper", "left", "bright", "error"]
    names = np.array(["upper", "left", "bright"])
    exact = [row["labels"] == "; ".join(names[label > 0.5]) for row, label in zip(rows, wanted.numpy(), strict=True)]
    assert np.mean(exact) == pytest.approx(metrics["val/exact"])


class Mean(Regression):
    """Sums that are means."""

    def sums(self, outputs: Any, labels: Any) -> Any:
        return super().sums(outputs, labels) / len(labels)


class Strange(Regression):
    """A metric that it does not say."""

    def summary(self, sums: Any, samples: float) -> dict[str, float]:
        return {**super().summary(sums, samples), "odd": 1.0}


REFUSED: list[tuple[list[str], str]] = [
    (
        ["data.labels=side", "task=regression"],
        "task=regression: learns numbers, and squares has a class for each sample",
    ),
    (
        ["data.labels=place", "loss=cross_entropy"],
        "loss=cross_entropy: needs a class for each sample, and task=regression has none",
    ),
    (["data.labels=place", "model.num_classes=3"], "model.num_classes=3: makes outputs (N, 3) for squares"),
    (["data.labels=place", "sampler=class_balanced"], "sampler=class_balanced: needs a class for each sample"),
    (["data.labels=place", "loss=mse", "+loss.reduction=sum"], "loss.reduction=sum: is the sum over a batch"),
    (
        ["data.labels=place", "best.metric=val/acc1"],
        "best.metric=val/acc1: a validation here measures val/loss, val/mae",
    ),
    (
        ["data.labels=traits", "loss.pos_weight=balanced", "loss=binary_cross_entropy"],
        "loss.pos_weight=balanced: needs",
    ),
    (["data.labels=traits", "loss=binary_cross_entropy", "loss.pos_weight=[1,2]"], "has 2 factors for 3 labels"),
    (["data.labels=place", "task._target_=tests.tasks.test_runs.Mean"], "its sums (M,) of a batch are not those of"),
    (["data.labels=place", "task._target_=tests.tasks.test_runs.Strange"], "its summary has odd, which is not among"),
    (["data.labels=traits", "task=multi_label", "task.threshold=1"], "task.threshold=1.0: must be less than 1"),
]


@pytest.mark.all
@pytest.mark.parametrize(("overrides", "why"), REFUSED, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_what_a_task_cannot_do_is_refused_with_a_sentence(overrides: list[str], why: str, tmp_path: Path) -> None:
    with hydra_app(str(HERE / "conf")) as app, pytest.raises(UserError) as refused:
        typed = [*RUN[2:], *overrides]
        get_ready(plain(compose(app, typed)), typed_keys(typed), str(tmp_path))
    assert why in str(refused.value)


@pytest.mark.all
def test_checkpoints_and_weights_of_another_task_are_refused(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    labels, folder, _ = trained
    if labels == "traits":
        return
    other: Any = "data.labels=traits"
    shown = " ".join(run(tmp_path / "r", other, f"resume={folder}", "resume.allow_changes=true", code=2).split())
    assert "task=multi_label" in shown and "is of task=regression" in shown
    shown = " ".join(run(tmp_path / "e", other, "mode=eval", f"weights={folder}", code=2).split())
    assert "was trained with task=regression, and this is task=multi_label" in shown
