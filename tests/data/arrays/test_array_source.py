"""CIFAR-10, MNIST and mnist.json.gz: read as others read them, augmented as whole batches, refused when damaged."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets
from torchvision.datasets import mnist as theirs

from tests import pictures
from tests.pictures import config, silent
from trainer.config import schema
from trainer.data.arrays.augmented import _shifted
from trainer.data.feed import Feed
from trainer.data.placement import Placement
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.sets.cifar import DRAWN, Cifar10
from trainer.data.sets.digits import Digits
from trainer.data.sets.mnist import Mnist
from trainer.data.sets.mnist_json import MnistJson
from trainer.data.sets.random_images import RandomImages
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(source: DataSource) -> tuple[Facts, Splits]:
    facts = source.prepare(source.facts(1), silent)
    return facts, source.open(facts)


def test_cifar_is_read_as_by_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = pictures.cifar(tmp_path)
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda path, md5: True)
    source = Cifar10(**config(schema.Cifar10Data, root=str(root)))
    facts, splits = opened(source)
    assert (facts.kind, facts.train_samples, facts.val_samples, facts.shape) == ("real", 100, 20, (3, 32, 32))
    for train, split in ((True, splits.train), (False, splits.val)):
        truth = datasets.CIFAR10(str(root), train=train)
        images = split.images if train else split.inputs
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), truth.data)
        assert split.labels.tolist() == truth.targets
    assert source.class_names(facts) == truth.classes


class Wicked:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"damaged", "is not a file of CIFAR-10"),
        (pickle.dumps(Wicked()), r"it asks for builtins\.print"),
        (pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1]}, 2), "3 images and 2 labels"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, 2),
            r"1 of 102 labels are wrong, which should be 0 to 9; the first is 10, of image 1 in .*data_batch_3",
        ),
        (
            pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": [-1, 2, 77]}, 2),
            "2 of 103 labels are wrong.*the first is -1",
        ),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10**30]}, 2), "is not a file of CIFAR-10"),
        (pickle.dumps({"data": np.zeros((2, 100), np.uint8), "labels": [0, 1]}, 2), "is not a file of CIFAR-10"),
    ],
)
def test_wrong_cifar_files_are_refused_and_not_executed(
    tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pictures.cifar(tmp_path)
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(UserError, match=says):
        Cifar10(**config(schema.Cifar10Data, root=str(root))).facts(1)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_as_by_torchvision(tmp_path: Path, packed: bool) -> None:
    root = pictures.mnist(tmp_path, packed=packed)
    plain = pictures.mnist(tmp_path / "plain") / "MNIST" / "raw"
    source = Mnist(**config(schema.MnistData, root=str(root)))
    facts, splits = opened(source)
    assert (facts.kind, facts.train_samples, facts.val_samples) == ("real", 30, 10)
    for images, labels, name in (
        (splits.train.images, splits.train.labels, "train"),
        (splits.val.inputs, splits.val.labels, "t10k"),
    ):
        assert torch.equal(images[:, 0], theirs.read_image_file(str(plain / f"{name}-images-idx3-ubyte")))
        assert torch.equal(labels, theirs.read_label_file(str(plain / f"{name}-labels-idx1-ubyte")))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train-images-idx3-ubyte", b"\x1f\x8b", "is not a file of MNIST"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03", "unsigned bytes"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x09" + bytes(9), "9 labels"),
        (
            "train-images-idx3-ubyte",
            b"\0\0\x08\x03\0\0\0\x1e\0\0\0\x1c\0\0\0\x1c" + bytes(784 * 12),
            "is damaged: of 30 entries it has 12",
        ),
        (
            "t10k-labels-idx1-ubyte",
            b"\0\0\x08\x01\0\0\0\x0a" + bytes(7) + b"\x0a\x01\x63",
            "2 of 40 labels are wrong, which should be 0 to 9; the first is 10, of image 7 in .*t10k-labels",
        ),
    ],
)
def test_damaged_mnist_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    root = pictures.mnist(tmp_path)
    (root / "MNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        Mnist(**config(schema.MnistData, root=str(root))).facts(1)


def test_cut_and_damaged_gz_files_of_mnist_are_named(tmp_path: Path) -> None:
    root = pictures.mnist(tmp_path, packed=True)
    path = root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:5000], whole[:200] + bytes(200) + whole[400:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is not a file of MNIST"):
            Mnist(**config(schema.MnistData, root=str(root))).facts(1)


MADE = {"cifar10": (schema.Cifar10Data, Cifar10, pictures.cifar), "mnist": (schema.MnistData, Mnist, pictures.mnist)}


@pytest.mark.parametrize("name", MADE)
def test_arrays_are_made_once_and_mapped_by_all_workers(tmp_path: Path, own_cache: Path, name: str) -> None:
    kind, source, make = MADE[name]
    node = config(kind, root=str(make(tmp_path / "d")))
    assert not own_cache.exists() and source(**node).facts(1) and not own_cache.exists(), "facts write nothing"
    facts, splits = opened(source(**node))
    (place,) = (p for p in (own_cache / name).iterdir() if p.is_dir())
    assert f"mapped by all workers of a host ({place})" in facts.cache
    made = (place / "train.npy").stat().st_mtime_ns
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{place}/{split}.npy" in maps for split in ("train", "val")), "pages of the file, not copies"
    for path in (tmp_path / "d").rglob("*_batch*" if name == "cifar10" else "*ubyte"):
        about = path.stat()
        path.write_bytes(bytes(about.st_size))  # who reads the files again would find nothing in them
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    again_facts, again = opened(source(**node))
    assert again_facts == facts and torch.equal(again.train.images, splits.train.images)
    assert (place / "train.npy").stat().st_mtime_ns == made


def changed(root: Path, name: str) -> Path:
    """One pixel of a set's files is another."""
    path = root / ("cifar-10-batches-py/data_batch_2" if name == "cifar10" else "MNIST/raw/t10k-images-idx3-ubyte")
    if name == "cifar10":
        content = pickle.loads(path.read_bytes())
        content["data"][3, 500] ^= 1
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    return root


@pytest.mark.parametrize("name", MADE)
def test_digest_is_of_images_and_labels_alone(tmp_path: Path, name: str) -> None:
    kind, source, make = MADE[name]
    if name == "cifar10":
        pictures.borrow_drawn_flowers(**asdict(DRAWN))

    def digest(root: Path, prepared: bool = True, **options: Any) -> str:
        one = source(**config(kind, root=str(root), **options))
        facts = one.facts(1)
        return one.fingerprint(one.prepare(facts, silent) if prepared else facts)

    one = digest(make(tmp_path / "a"))
    assert len(one) <= 36
    assert digest(make(tmp_path / "b"), flip=0.3, pad_crop=1, augment="randaugment", erasing=0.2) == one
    assert digest(tmp_path / "a", prepared=False) == digest(tmp_path / "b", download=True) == one
    assert digest(changed(make(tmp_path / "c"), name)) != one
    stand_in = digest(tmp_path / "none")
    assert digest(tmp_path / "nothing", flip=0.3) == stand_in != one


def test_digest_of_the_json_file_is_of_what_it_holds(tmp_path: Path) -> None:
    def digest(path: Path, **options: Any) -> str:
        source = json_source(path, **options)
        return source.fingerprint(source.prepare(source.facts(1), silent))

    packed = pictures.mnist_json(tmp_path / "m.json.gz")
    parts = json.loads(gzip.decompress(packed.read_bytes()))
    (tmp_path / "other.json").write_text(json.dumps(parts))
    assert digest(tmp_path / "other.json") == digest(packed) != digest(packed, val_split="eval")
    parts[1][0][2][100] += 0.25
    (tmp_path / "other.json").write_text(json.dumps(parts))
    assert digest(tmp_path / "other.json") != digest(packed) == digest(packed, batch_size=7)
    assert digest(tmp_path / "other.json", val_split="eval") == digest(packed, val_split="eval")


@pytest.mark.parametrize(("kind", "source"), [(schema.Cifar10Data, Cifar10), (schema.MnistData, Mnist)])
def test_what_cannot_be_had_is_refused_or_replaced_loudly(tmp_path: Path, kind: type, source: type) -> None:
    facts = source(**config(kind, root=str(tmp_path))).facts(1)
    assert facts.kind == "embedded" and facts.stand_in.startswith("this is NOT ")
    with pytest.raises(UserError, match=r"cannot be downloaded \(data\.download=false\)"):
        source(**config(kind, root=str(tmp_path), on_missing="error")).facts(1)


def test_stand_in_of_mnist_is_scikit_learns_digits(tmp_path: Path) -> None:
    source = Mnist(**config(schema.MnistData, root=str(tmp_path)))
    splits = source.open(source.facts(1))
    images, labels = splits.train.images, splits.train.labels
    assert images.shape == (1437, 1, 28, 28) and images.dtype == torch.uint8 and images[:, :, :4].max() == 0
    centroids = torch.stack([images[labels == n].double().mean(0) for n in range(10)]).flatten(1)
    guesses = torch.cdist(splits.val.inputs.double().flatten(1), centroids).argmin(1)
    assert (guesses == splits.val.labels).double().mean() > 0.85, "they are digits with their labels"


def test_windows_are_cut_from_the_framed_image() -> None:
    images = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8).view(2, 3, 5, 4) + 1
    places = np.linspace(0, 0.999, 5)
    for down in places:
        for right in places:
            ours = _shifted(images, 2, np.array([down, 0.0]), np.array([right, 0.999]))
            framed = torch.nn.functional.pad(images, (2, 2, 2, 2))
            top, left = int(5 * down), int(5 * right)
            assert torch.equal(ours[0], framed[0, :, top : top + 5, left : left + 4])
            assert torch.equal(ours[1], framed[1, :, 0:5, 4:8])


def test_batches_are_augmented_by_sample_and_epoch_alone(tmp_path: Path) -> None:
    source = Cifar10(**config(schema.Cifar10Data, root=str(pictures.cifar(tmp_path)), erasing=0.5))
    train = opened(source)[1].train
    whole, labels = train.augmented((1, 4), np.arange(100))
    order = np.random.default_rng(0).permutation(100)
    parts = torch.cat([train.augmented((1, 4), order[n : n + 7])[0] for n in range(0, 100, 7)])
    assert torch.equal(parts, whole[order]) and torch.equal(labels, train.labels)
    again, _ = train.augmented((1, 4), np.arange(100) + 100)
    assert not torch.equal(again, whole), "a repeated sample is augmented otherwise"


def json_source(path: Path, **options: Any) -> MnistJson:
    return MnistJson(**config(schema.MnistJsonData, path=str(path), **options))


@pytest.mark.parametrize("val_split", ["valid", "eval"])
def test_json_file_is_read_as_by_the_json_module(tmp_path: Path, val_split: str) -> None:
    path = pictures.mnist_json(tmp_path / "m.json.gz", (24, 8, 5))
    parts = json.loads(gzip.decompress(path.read_bytes()))
    source = json_source(path, val_split=val_split)
    facts = source.prepare(source.facts(1), silent)
    assert (facts.train_samples, facts.val_samples) == (24, 8 if val_split == "valid" else 5)
    splits = source.open(facts)
    for ours, (images, labels) in ((splits.train, parts[0]), (splits.val, parts[1 if val_split == "valid" else 2])):
        images_mine, labels_mine = ours.batch(np.arange(len(ours)))
        assert torch.equal(images_mine.flatten(1), torch.tensor(images)) and labels_mine.tolist() == labels


def test_numbers_of_the_json_file_reach_the_model_as_they_are(tmp_path: Path) -> None:
    """In [-1, 1] as the reference's file has them: no mean is taken off, nothing is divided."""
    images = np.linspace(-1, 1, 6 * 784).reshape(6, 784)
    parts = [[images.tolist(), [0, 1, 2, 3, 4, 5]], [images[:2].tolist(), [0, 1]], [[], []]]
    (tmp_path / "m.json").write_text(json.dumps(parts))
    source = json_source(tmp_path / "m.json")
    splits = source.open(source.prepare(source.facts(1), silent))
    feed = Feed(
        splits,
        DistributedBatchSampler(6, 6, shuffle=False),
        EvaluationSampler(2, 2),
        Placement(splits, torch.device("cpu"), torch.float32, False),
    )
    ((_, batches),) = feed.updates(0)
    (batch,) = batches
    assert torch.equal(batch.inputs.flatten(1), torch.from_numpy(images).float())
    ((_, seen),) = feed.evaluation(0, 1)
    assert torch.equal(seen.inputs.flatten(1), torch.from_numpy(images[:2]).float())


def test_images_of_bytes_are_divided_and_normalised_and_floats_are_not_divided(tmp_path: Path) -> None:
    """Of each array source, what the model gets is what its page says, computed here from the files' own numbers."""
    cpu = torch.device("cpu")
    for kind, source, make in MADE.values():
        one = source(**config(kind, root=str(make(tmp_path / source.__name__)), flip=0.0, pad_crop=0))
        splits = opened(one)[1]
        raw = splits.val.inputs.double().numpy() / 255
        mean, std = (np.array(v).reshape(-1, 1, 1) for v in (one.mean, one.std))
        ours = Placement(splits, cpu, torch.float64, False)(splits.val.inputs, splits.val.labels)[0].numpy()
        assert np.allclose(ours, (raw - mean) / std, atol=1e-12)
    digits = Digits(**config(schema.DigitsData))
    splits = digits.open(digits.facts(1))
    assert splits.train.inputs.max() == 1.0 and splits.train.inputs.min() == 0.0
    ours = Placement(splits, cpu, torch.float64, False)(splits.train.inputs, splits.train.labels)[0]
    assert abs(float(ours.mean())) < 0.01 and abs(float(ours.std()) - 1) < 0.01, (
        "normalised by its own mean and deviation"
    )
    noise = RandomImages(**config(schema.RandomImagesData, image_size=8))
    assert noise.open(noise.facts(1)).mean is None


def test_json_file_is_streamed(tmp_path: Path) -> None:
    """The peak of memory does not grow with the number of images."""
    import tracemalloc

    peaks = []
    for number, count in enumerate((20, 120)):
        source = json_source(pictures.mnist_json(tmp_path / f"{number}.json.gz", (count, 4, 4)))
        tracemalloc.start()
        source.prepare(source.facts(1), silent)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100 * 784, "less than a byte for each further number"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("no json", "breaks off"),
        ([[[[0.5] * 784], [1]], [[[0.5] * 783], [1]], [[], []]], r"'valid': image 0 has 783 numbers"),
        ([[[[0.5] * 784], [10]], [[], []], [[], []]], r"at labels 0 of part 'train' there is 10"),
        ([[[[0.5] * 784], [1]], [[], []]], "has no images in its part 'valid'"),
        ({"train": []}, "at its start"),
        ([[[[0.5] * 784], [1]]] * 4, "more than three parts"),
    ],
)
def test_wrong_json_files_are_refused_with_the_place(tmp_path: Path, parts: Any, says: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(parts if isinstance(parts, str) else json.dumps(parts))
    with pytest.raises(UserError, match=says):
        json_source(path).facts(1)


def test_json_file_with_other_labels_than_images_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps([[[[0.5] * 784] * 2, [1]], [[[0.5] * 784], [1]], [[], []]]))
    source = json_source(path)
    with pytest.raises(UserError, match="2 images and 1 labels"):
        source.prepare(source.facts(1), silent)
    assert not list((tmp_path / "cache").rglob("*.npy")), "nothing half-written is left"


def test_truncated_json_file_is_refused(tmp_path: Path) -> None:
    path = pictures.mnist_json(tmp_path / "m.json.gz")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="breaks off after image"):
        json_source(path).facts(1)
