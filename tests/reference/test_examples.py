"""Facts of the reference's examples that no other test looks at."""

from __future__ import annotations

import torch

from trainer.config.schema import RandomImagesData
from trainer.data.sets.random_images import RandomImages
from trainer.models.lenet import LeNet


def test_lenet_has_the_examples_layers() -> None:
    layers = [
        layer
        for layer in LeNet().modules()
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear, torch.nn.MaxPool2d))
    ]
    assert [str(layer) for layer in layers] == [
        "Conv2d(1, 20, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))",
        "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "Conv2d(20, 20, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))",
        "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "Linear(in_features=980, out_features=10, bias=True)",
    ]
    assert LeNet()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_random_images_follow_from_their_number_and_have_all_classes() -> None:
    """The reference draws new numbers at each access, and labels below 101."""
    source = RandomImages(**{**vars(RandomImagesData()), "image_size": 4})
    one, other = (source.open(source.facts(32)).train for _ in range(2))
    images, labels = zip(*(one[number] for number in range(len(one))), strict=True)
    assert len(images) == 3200 and float(torch.stack(images).min()) >= 0 and float(torch.stack(images).max()) < 1
    assert torch.equal(other[7][0], images[7]) and source.facts(32).classes == 102
    assert int(torch.stack(labels).min()) >= 0 and int(torch.stack(labels).max()) <= 101
