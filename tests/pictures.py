"""Small data that tests make: pictures in class folders, tar shards, CIFAR's and MNIST's files."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.data.drawn_flowers import draw

CLASSES = ["daisy", "iris", "rose"]
COMMON = os.environ.get("TRAINER_CACHE")
"""The cache of all tests, if it is not the user's; some tests have one of their own."""


def config(kind: type, **given: Any) -> dict[str, Any]:
    """A ``data`` node with the schema's defaults; nothing is downloaded unless told."""
    node = {k: v for k, v in asdict(kind()).items() if k != "_target_"}  # type: ignore[call-overload]
    return node | ({"download": False} if "download" in node else {}) | given


def borrow_drawn_flowers(**which: int) -> None:
    """The cache of this test has drawn flowers that are drawn once, into the cache of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRAINER_CACHE", raising=False)
        if COMMON is not None:
            patch.setenv("TRAINER_CACHE", COMMON)
        common = draw.draw(draw.Drawing(**which))
    shutil.copytree(common, draw.folder(draw.Drawing(**which)), copy_function=shutil.copyfile)


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def picture(label: int, number: int, height: int = 40, width: int = 56) -> Image.Image:
    """A smooth picture that tells its class by colour, with a little noise."""
    random = np.random.default_rng((label, number))
    rows, columns = np.mgrid[0:height, 0:width]
    base = np.stack([rows * 3, columns * 2, np.full((height, width), 60 * label)], 2)
    return Image.fromarray((base + random.integers(0, 30, (height, width, 3))).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The picture's bytes."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def image_folder(root: Path, per_class: int = 6, val: int = 2, classes: list[str] = CLASSES) -> Path:
    """``root/{train,val}/CLASS/N.jpg`` of different sizes."""
    for split, count in (("train", per_class), ("val", val)):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = picture(label, number + 100 * (split == "val"), 40 + number, 56 - number)
                (folder / f"{number}.jpg").write_bytes(encoded(image, quality=95))
    return root


def shard(path: Path, samples: list[tuple[str, bytes, int]], labels: str = "cls") -> Path:
    """A tar file in WebDataset's layout."""
    with tarfile.open(path, "w") as tar:
        for key, content, label in samples:
            written = str(label).encode() if labels == "cls" else json.dumps({"label": label}).encode()
            for name, data in ((f"{key}.jpg", content), (f"{key}.{labels}", written)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def flowers_102(root: Path, labels: list[int], train: list[int], val: list[int], test: list[int] | None = None) -> Path:
    """Flowers-102 in ``root/flowers-102`` as torchvision lays it out, of small pictures; images are numbered from 1."""
    from scipy.io import savemat

    place = root / "flowers-102"
    (place / "jpg").mkdir(parents=True)
    for number in range(1, len(labels) + 1):
        (place / "jpg" / f"image_{number:05d}.jpg").write_bytes(encoded(picture(number % 3, number)))
    savemat(place / "imagelabels.mat", {"labels": [labels]})
    savemat(place / "setid.mat", {"trnid": [train], "valid": [val], **({"tstid": [test]} if test else {})})
    return root


def cifar(root: Path, per_batch: int = 20, seed: int = 0) -> Path:
    """CIFAR-10's files in ``root/cifar-10-batches-py``, filled with noise."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        content = {
            "data": random.integers(0, 256, (per_batch, 3072), dtype=np.uint8),
            "labels": random.integers(0, 10, per_batch).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    return root


def mnist(root: Path, train: int = 30, val: int = 10, packed: bool = False) -> Path:
    """MNIST's files in ``root/MNIST/raw``, filled with noise."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", val)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for kind, array, code in (("images-idx3", images, 3), ("labels-idx1", labels, 1)):
            content = b"\0\0\x08" + bytes([code]) + struct.pack(f">{code}I", *array.shape) + array.tobytes()
            path = folder / f"{name}-{kind}-ubyte"
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    return root


def mnist_json(path: Path, counts: tuple[int, ...] = (24, 8, 8)) -> Path:
    """The reference's file, filled with noise."""
    random = np.random.default_rng(1)
    parts = [[(random.integers(0, 256, (n, 784)) / 256).tolist(), random.integers(0, 10, n).tolist()] for n in counts]
    path.write_bytes(gzip.compress(json.dumps(parts).encode()))
    return path


def weights(path: Path, name: str = "resnet50", num_classes: int = 1000) -> Path:
    """A file of a torchvision model's weights, drawn from a seed."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(7)
    torch.save(get_model(name, num_classes=num_classes).state_dict(), path)
    return path


def needs(recipe: str, folder: Path) -> list[str]:
    """The overrides with data made in the folder for recipes that cannot run without the user's."""
    if recipe in ("mnist_json", "mnist_reference", "mnist_reference_devices"):
        return [f"data.path={mnist_json(folder / 'mnist.json.gz')}"]
    if recipe in ("resnet50_imagefolder", "resnet50_finetune"):
        own = [f"data.root={image_folder(folder / 'pictures', per_class=24)}"]
        return own if recipe == "resnet50_imagefolder" else [*own, f"model.weights={weights(folder / 'resnet50.pt')}"]
    return []
