"""Options of the training data reach the training: each changes the losses of the same command line, and repeats its
own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from tests.composed import composed
from tests.pictures import cifar
from trainer.config.instantiate import call_target

PLAIN = """
    +recipe=cifar10_convnet data.download=false data.batch_size=10 max_steps=3 execution.log_every=1
    execution.threads=1 execution.val_every=0 precision=fp64 tracking=none device=cpu
""".split()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cifar(tmp_path_factory.mktemp("cifar"))


@pytest.fixture
def losses(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer.job.curves.draw", lambda *arguments: None)
    monkeypatch.setattr("trainer.tasks.class_pictures.draw", lambda *arguments: None)

    def run(*overrides: str) -> list[float]:
        where = tmp_path / str(len(list(tmp_path.iterdir())))
        trainer.run([*PLAIN, f"data.root={root}", *overrides, f"hydra.run.dir={where}"])
        points = [json.loads(line)["metrics"] for line in (where / "metrics.jsonl").read_text().splitlines()]
        return [p["train/loss"] for p in points if "train/loss" in p]

    return run


OPTIONS = """
    data.mixup=0.4 data.cutmix=1.0 sampler=class_balanced sampler=repeated_augmentation loss.label_smoothing=0.2
    data.flip=0.5 data.pad_crop=4 data.augment=randaugment data.erasing=0.5
""".split()


@pytest.mark.parametrize("options", [OPTIONS[::4], pytest.param(OPTIONS, marks=pytest.mark.all)], ids=len)
def test_every_option_changes_the_training(losses, options: list[str]) -> None:  # type: ignore[no-untyped-def]
    plain = losses()
    assert len(plain) == 3 and losses() == plain
    seen = {option: losses(option) for option in options}
    assert all(len(values) == 3 for values in seen.values())
    assert [option for option, values in seen.items() if values == plain] == []
    assert len({tuple(values) for values in seen.values()}) == len(options), "and each in its own way"


def test_label_smoothing_is_the_share_that_all_classes_get() -> None:
    node = composed(*PLAIN, "loss.label_smoothing=0.3")["loss"]
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(6, 10)), random.integers(0, 10, 6)
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    truth = -(0.7 * log[np.arange(6), labels] + 0.3 * log.mean(1)).mean()
    ours = call_target(node, "loss")(torch.from_numpy(logits), torch.from_numpy(labels))
    assert float(ours) == pytest.approx(truth, rel=1e-12)
