"""data.decode=gpu: batches of encoded images become those of the ordinary path, decoded and cut on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchcodec import decoders

import trainer
from tests.pictures import config, encoded, picture, silent
from tests.runs import losses
from trainer.config import schema
from trainer.data.augment.mixing import Mixing
from trainer.data.augment.views import CentreView, TrainView, WindowView, resized, resized_in_float
from trainer.data.feed import Feed
from trainer.data.images.dataset import ImageSet
from trainer.data.images.encoded import AHEAD, DeviceDecoder, EncodedImages
from trainer.data.placement import Placement
from trainer.data.reader import Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.source import Splits
from trainer.errors import RunFailed
from trainer.planning import auto

CPU = torch.device("cpu")
SEVERAL = 13


def write_pictures(root: Path) -> None:
    """JPEGs of three classes, among them a grey and a turned one, and two that no GPU decodes: a PNG and CMYK."""
    for label, name in enumerate(("daisy", "iris", "rose")):
        for part in ("train", "val"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(SEVERAL):
                image = picture(label, number, 40 + 5 * number, 90 - 3 * number)
                kind, options = "JPEG", dict[str, Any]()
                if number == 1:
                    image = image.convert("L")
                elif number == 2:
                    options["exif"] = exif = Image.Exif()
                    exif[0x0112] = 6
                elif number == 3:
                    kind = "PNG"
                elif number == 4:
                    image = image.convert("CMYK")
                (folder / f"{number}.jpg").write_bytes(encoded(image, kind, **options))


def opened(root: Path, **given: Any) -> Splits:
    options = {"image_size": 32, "cache": "none", "erasing": 0.5, **given}
    source = ImageFolder(**config(schema.ImageFolderData, root=str(root), **options))
    return source.open(source.prepare(source.facts(1), silent))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "d")
    return tmp_path / "d"


@pytest.fixture
def close() -> Iterator[list[Any]]:
    """What is closed at the end."""
    made: list[Any] = []
    yield made
    for one in made:
        one.close()


def encoded_of(images: Any) -> EncodedImages:
    assert isinstance(images, ImageSet)
    return EncodedImages(images.listing, images.view)


@pytest.mark.parametrize("given", [{}, {"train_resize": 40}], ids=["crops", "windows"])
@pytest.mark.parametrize("mixing", [None, Mixing(0.2, 1.0, 1.0, 3)], ids=["plain", "mixed"])
def test_a_feed_gives_the_same_batches(root: Path, close: list[Any], given: dict[str, Any], mixing: Any) -> None:
    splits = opened(root, **given)

    def batches(train: Any, decoder: Any, reading: Reading) -> list[Any]:
        both = Splits(train, splits.val, splits.mean, splits.std)
        feed = Feed(
            both,
            DistributedBatchSampler(3 * SEVERAL, 5, seed=3),
            EvaluationSampler(3 * SEVERAL, 5),
            Placement(both, CPU, torch.float32, False),
            merge=2,
            reading=reading,
            decoder=decoder,
        )
        close.append(feed)
        found = [b for epoch in (0, 1) for _, update in feed.updates(epoch, epoch) for b in update]
        return [*found, feed.batch(1, 2)]

    images = encoded_of(splits.train)
    wanted = batches(splits.train, None, Reading(7, mixing=mixing))
    found = batches(images, DeviceDecoder(images, mixing, CPU), Reading(7, 2))
    assert len(found) == len(wanted) == 8 + 6 + 1
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.labels, other.labels)


def test_pixels_are_at_most_one_of_255_apart_where_the_device_resizes(root: Path, close: list[Any]) -> None:
    """A GPU resizes floating numbers and rounds, which is the same code on the CPU."""
    for given in ({"augment": "none"}, {"train_resize": 40}):
        splits = opened(root, **given)
        images, numbers = encoded_of(splits.train), np.arange(3 * SEVERAL)
        decoder = DeviceDecoder(images, None, CPU)
        close.append(decoder)
        decoder.view.resize = resized_in_float  # type: ignore[attr-defined]
        (found, _), (wanted, _) = (
            next(decoder.ahead(iter([images.augmented((7, 2), numbers)]))),
            splits.train.augmented((7, 2), numbers),  # type: ignore[union-attr]
        )
        apart = (found.int() - wanted.int()).abs()  # type: ignore[union-attr]
        assert found.dtype == torch.uint8 and 0 < int(apart.max()) <= 1  # type: ignore[union-attr]
        assert found.stride() == wanted.stride(), "as (N, H, W, C) in memory"  # type: ignore[union-attr]


def test_a_view_on_a_gpu_resizes_floating_numbers() -> None:
    gpu = torch.device("cuda")
    assert CentreView(36, 32).on(gpu).resize is resized_in_float and CentreView(36, 32).on(CPU).resize is resized
    augmentation = opened_augmentation()
    crops, windows = TrainView(32, (0.3, 1), (0.7, 1.4), augmentation), WindowView(40, 32, augmentation)
    assert crops.on(CPU).resize is resized and windows.on(CPU).resize is resized
    image = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8)
    there, here = (CentreView(36, 32, resize) for resize in (resized_in_float, resized))
    batches = [view(iter([image]), np.array([[50, 70]]), (0, 0), np.array([0])) for view in (there, here)]
    assert int((batches[0].int() - batches[1].int()).abs().max()) <= 1


def opened_augmentation() -> Any:
    from trainer.data.augment.views import Augmentation

    return Augmentation(0.5, None, 0.5, torch.zeros(3, dtype=torch.uint8))


def test_batches_are_decoded_ahead_and_come_in_order(root: Path, close: list[Any]) -> None:
    images = encoded_of(opened(root).train)
    decoder, read = DeviceDecoder(images, None, CPU), []
    close.append(decoder)

    def batches() -> Iterator[Any]:
        for number in range(7):
            read.append(number)
            yield images.augmented((7, 0), np.array([number]))

    for number, (_, labels) in enumerate(decoder.ahead(batches())):
        assert labels.tolist() == images.labels[number : number + 1].tolist()
        assert len(read) == min(7, number + 1 + AHEAD)


def test_a_damaged_image_is_named(root: Path, close: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    images = encoded_of(opened(root).train)
    path = root / "train" / "daisy" / "5.jpg"
    path.write_bytes(path.read_bytes()[:300])
    decoder = DeviceDecoder(images, None, CPU)
    close.append(decoder)
    with pytest.raises(RunFailed, match=r"daisy/5\.jpg cannot be read: .*data\.verify=true"):
        list(decoder.ahead(iter([images.augmented((7, 0), np.arange(SEVERAL))])))
    path.write_bytes(b"no image")
    with pytest.raises(RunFailed, match=r"daisy/5\.jpg cannot be read: is no image"):
        images.augmented((7, 0), np.array([next(n for n, name in enumerate(images.listing.names) if "/5." in name)]))
    whole, one_by_one = decoders.decode_jpeg, len

    def only_single(sources: list[Any], **options: Any) -> Any:
        if one_by_one(sources) > 1:
            raise RuntimeError("nvjpegDecodeBatched failed: 6")
        return whole(sources, **options)

    monkeypatch.setattr(decoders, "decode_jpeg", only_single)
    with pytest.raises(RunFailed, match=r"cannot decode on cpu: nvjpegDecodeBatched failed: 6\. Type data\.decode=cpu"):
        list(decoder.ahead(iter([images.augmented((7, 0), np.arange(3))])))


def test_a_run_that_decodes_on_its_device_has_the_losses_of_the_ordinary_one(
    warm: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = f"""
        model=lenet model.in_channels=3 model.image_size=32 data=imagefolder data.root={root} data.image_size=32
        data.batch_size=8 data.cache=none data.mixup=0.2 data.erasing=0.5 data.num_workers=1 epochs=2 tracking=none
        device=cpu execution.threads=1 execution.log_every=1
    """.split()
    for where in ("cpu", "gpu"):
        monkeypatch.setattr(auto, "choose_decoder", lambda *args, where=where: (where, ""))
        trainer.run([*typed, f"hydra.run.dir={tmp_path / where}"])
    assert losses(tmp_path / "cpu") == losses(tmp_path / "gpu") != []
