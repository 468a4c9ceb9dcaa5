"""The reference's examples begin as there: the distributions of their first parameters, and their first losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from trainer.models.convnet import Convnet
from trainer.models.embedding_tables import materialise
from trainer.models.lenet import LeNet
from trainer.models.log_loss import LogLoss
from trainer.models.reference_start import draw
from trainer.models.wide_and_deep import WideAndDeep


def began(make: type[nn.Module] | object, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make()  # type: ignore[operator]
    draw(model)
    return model


def test_each_layer_has_its_distribution() -> None:
    for layer in began(lambda: resnet18(num_classes=102), 0).modules():
        if isinstance(layer, nn.Conv2d):
            assert float(layer.weight.std()) == pytest.approx((2 / layer.weight[0].numel()) ** 0.5, rel=0.05)
        elif isinstance(layer, nn.Linear):
            assert float(layer.weight.abs().max()) == pytest.approx((6 / (512 + 102)) ** 0.5, rel=0.01)
            assert not layer.bias.any()
    model = began(lambda: WideAndDeep(table_size=9), 0)
    for layer in (module for module in model.deep if isinstance(module, nn.Linear)):
        assert float(layer.weight.std()) == pytest.approx(layer.in_features**-0.5, rel=0.1) and not layer.bias.any()
    wide = torch.cat([began(lambda: WideAndDeep(table_size=9), seed).wide.weight.flatten() for seed in range(40)])
    assert float(wide.abs().max()) <= 2 * 13**-0.5 and float(wide.std()) == pytest.approx(0.88 * 13**-0.5, rel=0.1)
    assert not model.wide.bias.any()


@pytest.mark.parametrize(
    ("make", "shape", "expected", "margin"), [(LeNet, (1, 28, 28), 3.27, 1.2), (Convnet, (3, 32, 32), 2.63, 0.5)]
)
def test_first_losses_are_near_the_references(
    make: type[nn.Module], shape: tuple[int, ...], expected: float, margin: float
) -> None:
    """Of images that are no photographs; torch's own start is at log(10) = 2.30."""
    losses = []
    for seed in range(4):
        images = torch.from_numpy(np.random.default_rng(seed).random((100, *shape), np.float32))
        images = 2 * images - 1 if make is LeNet else images
        labels = torch.arange(100) % 10
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(began(make, seed)(images), labels)))
    assert math.log(10) + 0.05 < np.mean(losses) and abs(np.mean(losses) - expected) < margin


def test_log_loss_is_the_references_formula() -> None:
    logits, labels = torch.tensor([-30.0, 0.3, 40.0, 2.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    p = 1 / (1 + np.exp(-logits.double().numpy()))
    truth = -np.mean(labels.numpy() * np.log(p + 1e-4) + (1 - labels.numpy()) * np.log(1 - p + 1e-4))
    assert float(LogLoss()(logits, labels)) == pytest.approx(truth, rel=1e-5)


def test_wide_and_deep_begins_at_its_first_loss() -> None:
    losses = []
    for seed in range(4):
        model = began(lambda: WideAndDeep(table_size=1000, init_scale=1.0), seed)
        materialise(model, seed)
        generator = np.random.default_rng(seed)
        inputs = {
            "dense": torch.from_numpy(generator.exponential(0.5, (2000, 13)).astype(np.float32)),
            "sparse": torch.from_numpy(generator.integers(0, 1000, (2000, 26))),
        }
        with torch.no_grad():
            losses.append(
                float(LogLoss()(model(inputs), torch.from_numpy((generator.random(2000) < 0.25).astype(np.float32))))
            )
    assert 0.6 < np.mean(losses) < 1.0
