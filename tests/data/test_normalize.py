"""data.normalize of every source of images: what reaches the model, and what the plan says of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pictures import borrow_drawn_flowers, config, image_folder, silent
from trainer.config import schema
from trainer.data.placement import Placement
from trainer.data.sets.cifar import DRAWN, Cifar10
from trainer.data.sets.digits import Digits
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.mnist import Mnist
from trainer.data.source import DataSource, Splits

KINDS: dict[str, tuple[type[DataSource], type, list[float], list[float]]] = {
    "imagefolder": (ImageFolder, schema.ImageFolderData, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "cifar10": (Cifar10, schema.Cifar10Data, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "mnist": (Mnist, schema.MnistData, [0.1307], [0.3081]),
    "digits": (Digits, schema.DigitsData, [0.305], [0.376]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_normalised_as_the_options_say(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    if kind == "cifar10":
        borrow_drawn_flowers(**asdict(DRAWN))
    made, options, mean, std = KINDS[kind]
    settings: dict[str, Any] = {} if kind == "digits" else {"root": str(tmp_path / "none"), "download": False}
    if kind == "imagefolder":
        settings = {"root": str(image_folder(tmp_path / "pictures")), "image_size": 32}
    other = [0.5] * len(mean), [0.25] * len(mean)
    cases = {
        "mean_std": ({}, mean, std),
        "mean": ({}, mean, [1.0] * len(mean)),
        "none": ({}, [0.0] * len(mean), [1.0] * len(mean)),
        "its own": ({"normalize": "mean_std", "mean": other[0], "std": other[1]}, *other),
    }
    for name, (more, less, by) in cases.items():
        source = made(**config(options, **{"normalize": name, **settings, **more}))
        facts = source.prepare(source.facts(1), silent)
        splits = source.open(facts)
        raw, _ = splits.val[0]  # type: ignore[index]
        pixels = raw.double().numpy() / (255 if raw.dtype == torch.uint8 else 1)
        truth = (pixels - np.array(less)[:, None, None]) / np.array(by)[:, None, None]
        placed, _ = Placement(splits, torch.device("cpu"), torch.float64, False)(raw[None], torch.tensor([0]))
        assert isinstance(placed, torch.Tensor) and np.allclose(placed[0].numpy(), truth, rtol=0, atol=1e-12), name
        said = source.image_preprocessing(facts)
        assert (said["mean"], said["std"]) == ((None, None) if name == "none" else (less, by))


def test_a_window_lies_anywhere_in_theresized_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.train_resize: each window is a part of the resized image, and every place comes as often as any other."""
    from trainer.data.augment.views import Augmentation, WindowView, resized

    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 30, 20), np.uint8))
    still = Augmentation(0.0, None, 0.0, torch.zeros(3, dtype=torch.uint8))
    count = 1600
    windows = WindowView(10, 8, still)(iter([image] * count), np.array([[30, 20]] * count), (0, 0), np.arange(count))
    whole = resized(image, 15, 10)
    places = [(top, left) for top in range(8) for left in range(3)]
    parts = [whole[:, top : top + 8, left : left + 8] for top, left in places]
    found = [next(n for n, part in enumerate(parts) if torch.equal(part, window)) for window in windows]
    counts = np.bincount(found, minlength=24)
    assert ((counts - count / 24) ** 2 / (count / 24)).sum() < 60, "chi-squared of 23 degrees: above 60 once in 30,000"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_bytes_become_16_bits_as_autocast_rounds(dtype: torch.dtype, channels_last: bool, normalised: bool) -> None:
    """Rounded once, as the numbers of 32 bits are that a first convolution gets under autocast."""
    mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]) if normalised else (None, None)
    splits, cpu = Splits(None, None, mean, std), torch.device("cpu")  # type: ignore[arg-type]
    images = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    labels = torch.zeros(1)
    wide, _ = Placement(splits, cpu, torch.float32, channels_last)(images, labels)
    narrow, _ = Placement(splits, cpu, torch.float32, channels_last, dtype)(images, labels)
    assert isinstance(wide, torch.Tensor) and isinstance(narrow, torch.Tensor) and narrow.dtype == dtype
    assert narrow.stride() == wide.stride()
    truth = images.double() / 255
    if normalised:
        truth = (truth - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(std).double().view(-1, 1, 1)
    unit = torch.finfo(dtype).eps / 2
    assert ((narrow.double() - truth).abs() <= truth.abs() * unit + 1e-6).all()
    assert ((narrow.double() - wide.to(dtype).double()).abs() <= truth.abs() * 2 * unit + 1e-6).all()
    floats, _ = Placement(splits, cpu, torch.float32, channels_last, dtype)(images.float(), labels)
    assert isinstance(floats, torch.Tensor) and floats.dtype == torch.float32, "only bytes are exact in 16 bits"
