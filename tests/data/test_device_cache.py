"""data.cache=device: samples lie on the device, where batches are cut; the same seed gives the same losses and pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from tests.pictures import config, image_folder, silent
from tests.runs import losses
from trainer.config import schema
from trainer.data.arrays.augmented import AugmentedArrays
from trainer.data.augment.views import Augmentation, CentreView, TrainView, WindowView, resized_in_float
from trainer.data.sets.image_folder import ImageFolder

FLOWERS = """
    model=lenet model.in_channels=3 model.image_size=32 data=embedded_flowers data.image_size=32 data.per_class=1
    data.batch_size=16 epochs=2 data.train_split=trnid tracking=none device=cpu execution.threads=1
    execution.log_every=1 data.erasing=0.5 data.mixup=0.2 data.cutmix=1.0 optimizer.lr=0.01
""".split()
CIFAR = """
    model=lenet model.in_channels=3 model.image_size=32 data=cifar10 data.download=false data.root=nowhere
    data.batch_size=64 epochs=1 limit_train_batches=8 tracking=none device=cpu execution.threads=1
    execution.log_every=1 data.erasing=0.5 data.mixup=0.2 optimizer.lr=0.01
""".split()


@pytest.mark.parametrize("typed", [FLOWERS, CIFAR], ids=["decoded", "arrays"])
def test_losses_are_those_of_the_ordinary_path(warm: None, tmp_path: Path, typed: list[str]) -> None:
    for cache in ("ram", "device"):
        trainer.run([*typed, f"data.cache={cache}", f"hydra.run.dir={tmp_path / cache}"])
    assert losses(tmp_path / "ram") == losses(tmp_path / "device") != []
