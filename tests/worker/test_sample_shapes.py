"""A model that does not take the data's samples is refused before a run: the layer, what came, and which key to set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.data.source import DataSource, Facts
from trainer.errors import UserError
from trainer.job.check import get_ready
from trainer.job.ready import Ready
from trainer.worker import probe

HERE = "tests.worker.test_sample_shapes"
BASE = ("+recipe=digits_lenet", "tracking=none", "device=cpu")


def ready(model: str, *overrides: str) -> Ready:
    changes = (*BASE, f"model._target_={HERE}.{model}", "~model.in_channels", "~model.image_size", *overrides)
    with hydra_app() as app:
        config = commands.plain(compose(app, list(changes)))
    return get_ready(config, commands.typed_keys(changes), "somewhere")


def refused(model: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        ready(model, *overrides)
    return caught.value


class Net(nn.Module):
    """A convolution and a linear layer, both of which depend on the data's shape."""

    def __init__(self, num_classes: int, channels: int = 3, side: int = 8, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(width * side**2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).flatten(1))


class Rows(nn.Module):
    """Takes rows of numbers (N, features)."""

    def __init__(self, num_classes: int, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, num_classes))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


class Words(nn.Module):
    """Takes ids of words (N, length)."""

    def __init__(self, num_classes: int, length: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 4), nn.Linear(4 * length, num_classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).flatten(1))


class Plain(nn.Module):
    """Computes with the samples itself."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight


class Flat(DataSource):
    """Samples of twelve numbers."""

    def facts(self, val_batch_size: int) -> Facts:
        return Facts("twelve numbers", "real", 40, 20, (12,), 10)

    def open(self, facts: Facts) -> Any:
        raise AssertionError("it is only looked at")


FLAT = (f"data._target_={HERE}.Flat",)


@pytest.mark.parametrize(
    ("model", "overrides", "why", "instead"),
    [
        ("Net", ("+model.channels=4",), r"its layer body.0 (Conv2d) got (N, 1, 8, 8): ", "model.channels=1"),
        ("Net", (), "its layer body.0 (Conv2d) got (N, 1, 8, 8): ", "+model.channels=1"),
        ("Net", ("+model.channels=1", "+model.side=32"), "its layer head (Linear) got (N, 320): ", "model.side=8"),
        ("Net", ("+model.channels=2", "+model.side=4"), "body.0 (Conv2d)", "model.channels=1 model.side=8"),
        (
            "Rows",
            (*FLAT, "+model.features=13"),
            "(12,), which twelve numbers has: its layer layers.0 (Linear) got (N, 12): ",
            "model.features=12",
        ),
        ("Words", (*FLAT, "+model.length=9"), "its layer head (Linear) got (N, 48): ", "model.length=12"),
        (
            "Plain",
            (),
            "does not take samples of (1, 8, 8), which scikit-learn's handwritten digits has: mm: mat1 and mat2 shapes",
            "",
        ),
    ],
)
def test_the_layer_what_came_and_the_key_to_set_are_named(
    model: str, overrides: tuple[str, ...], why: str, instead: str
) -> None:
    error = refused(model, *overrides)
    assert (error.what, error.instead) == (f"model ({HERE}.{model})", instead)
    assert why in error.why and error.why.startswith("does not take samples of ")


@pytest.mark.parametrize(("model", "key"), [("Rows", "features"), ("Words", "length")])
def test_what_is_advised_is_taken_and_inputs_without_a_name_may_be_ids(model: str, key: str) -> None:
    assert ready(model, *FLAT, f"+model.{key}=12").model.parameters


def test_several_keys_that_would_do_are_no_advice() -> None:
    assert refused("Either", "+model.first=2", "+model.second=2").instead == ""


class Either(nn.Module):
    """Takes images where one of its two numbers is their channels."""

    def __init__(self, num_classes: int, first: int, second: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(min(first, second), num_classes, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images).flatten(1)


@pytest.mark.parametrize(("model", "is_refused"), [("Net", True), ("Plain", False)])
def test_for_a_gpu_only_layers_that_run_everywhere_are_believed(model: str, is_refused: bool) -> None:
    checked = ready("Net", "+model.channels=1").checked
    config = checked.config.replaced("model", {"_target_": f"{HERE}.{model}", "num_classes": 10})
    config = type(config)(**{**vars(config), "device": "cuda"})
    built = probe.meta_model(config)
    try:
        assert probe.check_outputs(config, built, nn.CrossEntropyLoss(), checked.facts)[0] == "" and not is_refused
    except UserError as error:
        assert is_refused and "its layer body.0" in str(error)
