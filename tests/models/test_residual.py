"""Residual blocks that start as identities, found in any model that has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision import models

from trainer.models.residual import NoResidualBlocks, last_norms, zero_last_norms


def zeroed(model: nn.Module) -> list[str]:
    """Norms whose scale is zero."""
    norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    return [n for n, m in model.named_modules() if isinstance(m, norms) and not m.weight.any()]


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "resnext50_32x4d", pytest.param("wide_resnet50_2", marks=pytest.mark.long)]
)
def test_resnets_are_as_torchvision_makes_them(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = models.get_model(name, num_classes=3, zero_init_residual=True)
        torch.manual_seed(3)
        ours = models.get_model(name, num_classes=3)
    zero_last_norms(ours)
    assert zeroed(ours) == zeroed(theirs) != []
    for (key, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize(
    ("name", "blocks", "identities"),
    [
        ("mobilenet_v2", 10, "features.3"),
        ("efficientnet_b0", 9, "features.2.1"),
        ("regnet_x_400mf", 22, "trunk_output.block2.block2-1"),
    ],
)
def test_blocks_of_other_models_are_identities_at_the_start(name: str, blocks: int, identities: str) -> None:
    model = models.get_model(name, num_classes=3).eval()
    zero_last_norms(model)
    assert len(zeroed(model)) == blocks
    block = model.get_submodule(identities)
    channels = next(block.parameters()).shape[1]
    inputs = torch.rand(2, channels, 8, 8)  # not negative: a ReLU after the sum changes nothing
    assert torch.equal(block(inputs), inputs)


class Own(nn.Module):
    """A residual block of somebody's own, with a convolution and a norm on the shortcut."""

    def __init__(self, shortcut_first: bool) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Dropout(0.1)
        )
        self.shortcut_first = shortcut_first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.shortcut_first:
            return self.shortcut(inputs) + self.body(inputs)
        return self.body(inputs) + self.shortcut(inputs)


@pytest.mark.parametrize("shortcut_first", [True, False])
def test_the_shortcuts_norm_is_not_the_blocks(shortcut_first: bool) -> None:
    assert last_norms(Own(shortcut_first)) == ["body.3"]


@pytest.mark.parametrize("name", ["vgg11_bn", "densenet121", "vit_b_16", "swin_t", "convnext_tiny", "alexnet"])
def test_models_without_such_blocks_are_told_apart(name: str) -> None:
    with torch.device("meta"):
        model = models.get_model(name, num_classes=3)
    with pytest.raises(NoResidualBlocks, match="no residual block whose branch ends in a norm"):
        last_norms(model)


def test_a_model_whose_graph_cannot_be_read_says_so() -> None:
    class Branching(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) if inputs.sum() > 0 else inputs

    with pytest.raises(NoResidualBlocks, match="its graph cannot be read"):
        last_norms(Branching(2, 2))
