"""``loss.weight=balanced``: counted before the start, refused where no weight follows, and kept with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainer as package
from tests.runs import read
from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import UserError
from trainer.job.balanced_weights import weighed
from trainer.job.check import get_ready
from trainer.job.plan_table import rows
from trainer.job.prepared_data import prepared
from trainer.job.ready import Ready
from trainer.metrics.criterion import NEITHER, SAMPLES, WEIGHTS, stand_in
from trainer.models.lenet import LeNet
from trainer.planning.plan import Plan
from trainer.planning.training_checks import check_denominator
from trainer.tasks.loss_probe import denominator_of_classes
from trainer.tracking.describe import tags
from trainer.worker.probe import check_outputs

LABELS = torch.arange(10).repeat_interleave(torch.arange(10) + 2)
IMAGES = torch.rand(len(LABELS), 1, 8, 8, generator=torch.Generator().manual_seed(0))
SMALL = [
    "+recipe=digits_lenet",
    "tracking=none",
    "epochs=1",
    "data.batch_size=16",
    f"data._target_={__name__}.Unequal",
    *(f"~data.{key}" for key in ("val_fraction", "split_seed", "max_pixels", "max_file_mib")),
]
CONTRASTIVE = (f"loss._target_={__name__}.Contrastive", "~loss.label_smoothing")


class Unequal(DataSource):
    """Noise (1, 8, 8) with classes of unequal size; without the class ``lacks``, and with ``hides`` without its
    labels."""

    def facts(self, global_batch_size: int) -> Facts:
        return Facts("unequal noise", "drawn", len(self.kept()), len(self.kept()), (1, 8, 8), classes=10)

    def kept(self) -> torch.Tensor:
        return (self.config.get("lacks", -1) != LABELS).nonzero().flatten()

    def open(self, facts: Facts) -> Splits:
        data: Any = TensorDataset(IMAGES[self.kept()], LABELS[self.kept()])
        return Splits(Hidden(data) if self.config.get("hides") else data, data)


class Hidden(torch.utils.data.Dataset[Any]):
    """A data set that says a label with its sample alone."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        return self.inside[index]


class Contrastive(nn.Module):
    """A loss that compares the samples of a batch with each other."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)))


def ready(folder: Path, *typed: str) -> Ready:
    overrides = [*SMALL, *typed]
    with hydra_app() as app:
        config, keys = commands.plain(compose(app, overrides)), commands.typed_keys(overrides)
    return get_ready(config, keys, str(folder / "run"))


@pytest.mark.parametrize(
    ("typed", "what", "why"),
    [
        (["loss.weight=balanced", "+data.lacks=3"], "loss.weight=balanced", "class 3 has no sample"),
        (["loss.weight=balanced", "+data.hides=true"], "loss.weight=balanced", "no labels to count"),
        (["sampler=class_balanced", "+data.hides=true"], "sampler=class_balanced", "no labels to count"),
    ],
)
def test_what_cannot_be_balanced_is_refused_before_anything_is_written(
    typed: list[str], what: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why) as refused:
        ready(tmp_path, *typed)
    assert refused.value.what == what and refused.value.exit_code == 2 and not (tmp_path / "run").exists()
    if "hides" not in typed[1]:
        return
    ready(tmp_path, *refused.value.instead.replace(" with your own numbers", "").split(), typed[1])  # the advice works
    assert why in "".join(ready(tmp_path, *typed, "plan=true").plan.remarks.lacks)


class ForGpu(LeNet):
    """A model that runs on no CPU."""

    def forward(self, inputs: Any) -> Any:
        raise RuntimeError("no kernel for this device")


@pytest.mark.parametrize(
    ("typed", "found"),
    [(["loss.weight=balanced"], WEIGHTS), ([*CONTRASTIVE], NEITHER), (["loss.label_smoothing=0"], SAMPLES)],
)
def test_loss_is_tested_where_the_model_runs_on_a_gpu_alone(typed: list[str], found: str, tmp_path: Path) -> None:
    config = ready(tmp_path, *typed).checked.config
    facts = Facts("unequal noise", "drawn", 60, 60, (1, 8, 8), classes=10)
    target = f"{__name__}.ForGpu"
    on_gpu = config.replaced("device", "cuda").replaced("model", {**config.model, "_target_": target})
    assert check_outputs(on_gpu, ForGpu(10, 1, 8), stand_in(config.loss, 10), facts)[1] == found


def test_weights_for_fewer_classes_than_outputs_are_refused_with_what_to_type(tmp_path: Path) -> None:
    typed = ["loss.weight=balanced", "model.num_classes=12"]
    with pytest.raises(UserError, match=r"gives 10 weights, and the model .* makes 12 outputs") as refused:
        ready(tmp_path, *typed)
    assert (refused.value.what, refused.value.instead) == ("loss.weight=balanced", "model.num_classes=10")


@pytest.mark.parametrize("typed", ["sampler=class_balanced", "loss.weight=balanced"])
def test_labels_are_counted_once_and_again_where_the_data_are_others(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Facts] = []
    usual = Unequal.open
    monkeypatch.setattr(Unequal, "open", lambda self, facts: [opened.append(facts), usual(self, facts)][1])
    job = prepared(ready(tmp_path, typed))
    assert len(opened) == 1 and bool(job.plan.objective.class_weights) == (typed == "loss.weight=balanced")
    changed = job.with_facts(replace(job.checked.facts, attention="others"))
    assert weighed(changed).plan.objective.class_weights == job.plan.objective.class_weights and len(opened) == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balanced")
    package.run([*SMALL, "loss.weight=balanced", f"hydra.run.dir={folder}/run"])
    return folder / "run"


def test_the_weights_are_those_of_scikit_learn_and_are_kept_with_the_run(run: Path) -> None:
    wanted = compute_class_weight("balanced", classes=np.arange(10), y=LABELS.numpy())
    assert read(run / "result.json")["class_weights"]["weight"] == pytest.approx(wanted.tolist())
    plan = Plan.of(read(run / "plan.json"))
    shown = [float(number) for number in tags(plan, [])["trainer.loss_weight"].split()]
    assert shown == pytest.approx(wanted.tolist(), rel=1e-5)
    assert dict(rows(plan))["loss"].startswith("a mean over the weights of the samples' classes; weight 3.25, ")
    model = LeNet(10, 1, 8)
    load_model(model, str(run / "model.safetensors"))
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(IMAGES), LABELS, torch.tensor(wanted).float()).item()
    assert read(run / "result.json")["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_takes_the_weights_of_the_run_and_not_of_its_own_data(run: Path, tmp_path: Path) -> None:
    other = ready(tmp_path, "loss.weight=balanced", "+data.lacks=3", "mode=eval", f"weights={run}")
    assert other.plan.objective.class_weights == read(run / "result.json")["class_weights"]


def test_the_plan_says_what_was_found_about_a_loss_of_ones_own(tmp_path: Path) -> None:
    plan = ready(tmp_path, *CONTRASTIVE).plan
    assert dict(rows(plan))["loss"] == "no mean over samples" and "loss" not in dict(rows(ready(tmp_path).plan))
    alone = ready(tmp_path, "loss.weight=balanced", "strategy=pserver_async", "launch.workers=2").plan
    assert "classes, of each worker's own batches; weight " in dict(rows(alone))["loss"]


@pytest.mark.parametrize(
    "more", [["launch.nproc=2"], ["strategy.gradient_merge.k_steps=2"], ["strategy=pserver_sync", "launch.workers=2"]]
)
def test_a_loss_that_is_no_mean_is_refused_where_batches_are_parts(tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(UserError, match="is no mean over samples") as refused:
        ready(tmp_path, *CONTRASTIVE, *more)
    assert ready(tmp_path, *CONTRASTIVE, *refused.value.instead.split()).plan.objective.denominator == NEITHER, (
        "the advice works"
    )
    apart = ready(tmp_path, *CONTRASTIVE, "strategy=local_sgd", "strategy.k_steps=4", "launch.nproc=2")
    check_denominator(apart.checked, replace(apart.model, denominator=NEITHER))  # workers take steps of their own


def test_mixed_labels_and_ignored_ones_do_not_go_together() -> None:
    loss = nn.CrossEntropyLoss(ignore_index=2)
    config: Any = SimpleNamespace(
        mode="train", validation=True, loss={"_target_": "torch.nn.CrossEntropyLoss"}, node=lambda name: {"mixup": 0.4}
    )
    with pytest.raises(UserError, match=r"data\.mixup=0\.4: makes labels .* that are shares of classes") as refused:
        denominator_of_classes(config, loss, 4, 4)
    assert refused.value.instead == "data.mixup=0"
