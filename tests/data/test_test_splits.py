"""Each source's test samples are the ones that its files name, in their order, and no sample of the training."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.criteo.test_files import numbers, text
from tests.data.images.test_shard_samples import PLAIN, tar
from tests.pictures import cifar, config, flowers_102, image_folder, mnist, mnist_json, silent
from trainer.config import schema
from trainer.data.criteo.source import Criteo
from trainer.data.sets.cifar import Cifar10
from trainer.data.sets.digits import Digits
from trainer.data.sets.flowers import Flowers102
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.mnist import Mnist
from trainer.data.sets.mnist_json import MnistJson
from trainer.data.sets.shards import Shards
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))


def opened(source: DataSource) -> tuple[Facts, Splits]:
    facts = source.prepare(source.facts(1), silent)
    splits = source.open(facts)
    sets: list[Any] = [splits.train, splits.val, splits.test]
    sizes = [0 if one is None or not hasattr(one, "__len__") else len(one) for one in sets]
    assert sizes[1:] == [facts.val_samples, facts.test_samples], "what is told before the start is there"
    assert facts.streams or sizes[0] == facts.train_samples
    return facts, splits


def every(dataset: Any) -> tuple[Any, list[int]]:
    """All inputs and labels of a data set of arrays."""
    inputs, labels = dataset.batch(np.arange(len(dataset)))
    return inputs, labels.tolist()


@pytest.mark.parametrize(("split", "left"), [("trnid", "tstid"), ("tstid", "trnid"), ("trnid+valid", "")])
def test_flowers_are_tested_on_the_list_that_is_left(tmp_path: Path, split: str, left: str) -> None:
    lists = {"trnid": [4, 1], "valid": [3], "tstid": [6, 2, 5]}
    labels = [102, 7, 1, 7, 30, 12]
    flowers_102(tmp_path, labels, *lists.values())
    source = Flowers102(**config(schema.Flowers102Data, root=str(tmp_path), cache="none", train_split=split))
    facts, splits = opened(source)
    if not left:
        assert splits.test is None and not facts.test_samples and splits.val.labels.tolist() == [11, 6, 29]  # type: ignore[union-attr]
        return
    test: Any = splits.test
    assert test.labels.tolist() == [labels[n - 1] - 1 for n in lists[left]] and f"tested on {left}" in facts.splits
    assert [Path(test.sample_name(n)).name for n in range(len(test))] == [f"image_{n:05d}.jpg" for n in lists[left]]


def shards(tmp_path: Path, names: dict[str, range]) -> None:
    for name, part in names.items():
        tar(tmp_path / name, PLAIN[2 * part.start : 2 * part.stop])


def named(dataset: Any) -> list[int]:
    return [int(Path(dataset.sample_name(n)).name.partition(":")[2].partition(".")[0]) for n in range(len(dataset))]


@pytest.mark.parametrize("by", ["names", "test_path"])
def test_shards_are_tested_by_name_or_by_key(tmp_path: Path, by: str) -> None:
    first = {"names": ("train-0.tar", "test-0.tar", "test-1.tar"), "test_path": ("a-0.tar", "held-0.tar", "held-1.tar")}
    for name, part in zip(first[by], (range(12), range(12, 18), range(18, 24)), strict=True):
        shards(tmp_path, {name: part})
    paths = {"path": str(tmp_path / "*.tar")}
    if by == "test_path":
        paths = {"path": str(tmp_path / "a-*.tar"), "test_path": str(tmp_path / "held-*.tar")}
    facts, splits = opened(Shards(**config(schema.ShardsData, cache="none", val_fraction=0.25, **paths)))
    assert named(splits.test) == list(range(12, 24)), "each of its files, in their order"
    assert splits.test.labels.tolist() == [n % 3 for n in range(12, 24)]  # type: ignore[union-attr]
    assert sorted(named(splits.train) + named(splits.val)) == list(range(12)) and facts.val_samples == 3
    assert "held out by data.split_seed" in facts.splits


def of_shards(tmp_path: Path, names: str, **options: Any) -> Shards:
    """Shards of 12 samples each; the first has the samples 0 to 11, and so has the third."""
    for number, name in enumerate(names.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shards(tmp_path, {name: range(12 * (number % 2), 12 * (number % 2) + 12)})
    options = {"path": str(tmp_path / "*.tar"), **options}
    return Shards(**config(schema.ShardsData, cache="none", **options))


def test_shards_beside_those_of_the_splits_are_not_used_and_named(tmp_path: Path) -> None:
    facts, splits = opened(of_shards(tmp_path, "train-0.tar val-0.tar extra-0.tar"))
    assert (named(splits.train), named(splits.val)) == (list(range(12)), list(range(12, 24)))
    assert f"{tmp_path}/extra-0.tar: no shards of a split, and not used" in facts.attention


@pytest.mark.parametrize("names", ["train/000.tar test/000.tar", "a/train/x-0.tar a/test/x-0.tar"])
def test_folders_of_shards_tell_the_splits_where_the_files_do_not(tmp_path: Path, names: str) -> None:
    (tmp_path / "a").mkdir()
    path = "*/*/*.tar" if names.startswith("a/") else "*/*.tar"
    facts, splits = opened(of_shards(tmp_path, names, path=str(tmp_path / path)))
    assert named(splits.test) == list(range(12, 24)) and facts.train_samples + facts.val_samples == 12


@pytest.mark.parametrize(
    ("names", "typed"),
    [
        ("data-0.tar test-0.tar", "data.path='{}/data-*.tar' data.test_path='{}/test-*.tar'"),
        ("val-0.tar x-0.tar y-0.tar", "data.path='[{0}/x-*.tar,{0}/y-*.tar]' data.val_path='{0}/val-*.tar'"),
        ("train-0.tar birds_test-0.tar", "data.path='{}/train-*.tar' data.test_path='{}/birds_test-*.tar'"),
        ("val-0.tar test-0.tar", "data.path='DIR/train-*.tar' data.test_path='{}/test-*.tar'"),
    ],
)
def test_shards_for_the_test_are_not_trained_on_for_lack_of_a_name(tmp_path: Path, names: str, typed: str) -> None:
    with pytest.raises(UserError, match="do not tell which files are trained on") as refused:
        of_shards(tmp_path, names).facts(1)
    assert typed.format(tmp_path, tmp_path) in refused.value.instead
    same = str(tmp_path / "*.tar")
    assert of_shards(tmp_path, names, path=same, val_path=same).facts(1).val_samples > 12, "eval RUN DATA takes all"


def test_a_shard_of_two_splits_is_named(tmp_path: Path) -> None:
    every = str(tmp_path / "*.tar")
    said = of_shards(tmp_path, "a-0.tar b-0.tar", path=every, test_path=str(tmp_path / "b-0.tar")).facts(1).attention
    assert f"1 of 1 test shards are training shards as well: {tmp_path}/b-0.tar" in said


def test_shards_with_one_sample_of_each_class_have_nothing_to_hold_out(tmp_path: Path) -> None:
    shards(tmp_path, {"a-0.tar": range(3)})
    with pytest.raises(UserError, match="no validation samples: no class has two"):
        Shards(**config(schema.ShardsData, cache="none", path=str(tmp_path / "*.tar"))).facts(1)


def test_facts_say_which_samples_choose_the_model_and_which_test_it(tmp_path: Path) -> None:
    """The plan has this row (`splits`)."""

    def said(kind: Any, declared: type, **options: Any) -> str:
        splits: str = kind(**config(declared, **options)).facts(1).splits
        return splits

    held = "validation is 0.2 of the digits (data.val_fraction)"
    assert said(Digits, schema.DigitsData) == f"{held}, held out by data.split_seed=0"
    assert (
        said(Digits, schema.DigitsData, test_fraction=0.1)
        == f"{held}, the test 0.1 (data.test_fraction), held out by data.split_seed=0"
    )
    image_folder(tmp_path / "images")
    shutil.copytree(tmp_path / "images" / "val", tmp_path / "images" / "test")
    (tmp_path / "images" / "val").rename(tmp_path / "images" / "dev")
    folder = {"root": str(tmp_path / "images"), "cache": "none"}
    assert said(ImageFolder, schema.ImageFolderData, **folder) == "validation is in dev/, the test in test/"
    (tmp_path / "images" / "dev").rename(tmp_path / "dev_elsewhere")
    assert said(ImageFolder, schema.ImageFolderData, **folder).endswith(
        "held out by data.split_seed=0, the test in test/"
    )
    path = mnist_json(tmp_path / "m.json.gz", (24, 8, 5))
    assert (
        said(MnistJson, schema.MnistJsonData, path=str(path))
        == "validation is the file's part valid, the test its part eval"
    )
    assert "the set's test images" in said(MnistJson, schema.MnistJsonData, path=str(path), val_split="eval")
    flowers_102(tmp_path, [102, 7, 1], [1], [2], [3])
    flowers = {"root": str(tmp_path), "cache": "none", "train_split": "trnid+valid"}
    assert said(Flowers102, schema.Flowers102Data, **flowers).endswith(
        "validated on tstid, the set's test images, as in the reference"
    )
    (tmp_path / "rows.txt").write_bytes(text(range(100)))
    rows = {"path": str(tmp_path / "rows.txt"), "hash_size": 100}
    assert said(Criteo, schema.CriteoData, **rows, val_fraction=0.25).startswith("validation is 0.25 of the rows")
    both = said(Criteo, schema.CriteoData, **rows, val_path=rows["path"], test_path=rows["path"])
    assert both == "validation is data.val_path, the test data.test_path"
    keys = {"val_path": str(tmp_path / "b-0.tar"), "test_path": str(tmp_path / "c-0.tar")}
    made = of_shards(tmp_path, "a-0.tar b-0.tar c-0.tar", path=str(tmp_path / "a-0.tar"), **keys)
    assert made.facts(1).splits == "val by data.val_path; test by data.test_path"


@pytest.mark.parametrize("cache", [True, False])
def test_click_rows_are_tested_on_the_files_of_their_own(tmp_path: Path, cache: bool) -> None:
    for name, part in (("train", range(100)), ("test", range(100, 130))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.txt").write_bytes(text(part))
    paths = {"path": str(tmp_path / "train"), "test_path": str(tmp_path / "test")}
    facts, splits = opened(Criteo(**config(schema.CriteoData, val_fraction=0.25, hash_size=1000, cache=cache, **paths)))
    inputs, labels = every(splits.test)
    assert numbers(inputs["dense"].numpy()) == list(range(100, 130)) and labels == [n % 2 for n in range(100, 130)]
    assert facts.test_samples == 30 and max(numbers(every(splits.val)[0]["dense"].numpy())) < 100


@pytest.mark.parametrize(("val_split", "test"), [("valid", 2), ("eval", None)])
def test_the_json_file_is_tested_on_its_part_eval(tmp_path: Path, val_split: str, test: int | None) -> None:
    path = mnist_json(tmp_path / "m.json.gz", (24, 8, 5))
    parts = json.loads(gzip.decompress(path.read_bytes()))
    _, splits = opened(MnistJson(**config(schema.MnistJsonData, path=str(path), val_split=val_split)))
    if test is None:
        assert splits.test is None
        return
    images, labels = every(splits.test)
    assert torch.equal(images.flatten(1), torch.tensor(parts[test][0])) and labels == parts[test][1]


def cifar_source(root: Path, **settings: Any) -> tuple[Cifar10, list[int]]:
    cifar(root)
    theirs = pickle.loads((root / "cifar-10-batches-py" / "test_batch").read_bytes())
    return Cifar10(**config(schema.Cifar10Data, root=str(root), **settings)), theirs["labels"]


def mnist_source(root: Path, **settings: Any) -> tuple[Mnist, list[int]]:
    mnist(root)
    theirs = (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    return Mnist(**config(schema.MnistData, root=str(root), **settings)), list(theirs)


@pytest.mark.parametrize("make", [cifar_source, mnist_source])
def test_images_of_the_sets_test_are_the_validation_unless_a_part_is_held_out(tmp_path: Path, make: Any) -> None:
    source, theirs = make(tmp_path)
    facts, splits = opened(source)
    assert splits.test is None and every(splits.val)[1] == theirs and "as in the reference" in facts.splits
    whole = len(splits.train)  # type: ignore[arg-type]
    kept = type(source)(**{**source.config, "val_fraction": 0.1})
    facts, held = opened(kept)
    assert every(held.test)[1] == theirs and torch.equal(every(held.test)[0], every(splits.val)[0])
    assert (facts.train_samples, facts.val_samples) == (whole - whole // 10, whole // 10)
    train: Any = splits.train
    pieces: list[Any] = [held.val.inputs, held.train.images]  # type: ignore[union-attr]
    together = torch.cat([piece.flatten(1) for piece in pieces])
    assert sorted(map(bytes, together.numpy())) == sorted(map(bytes, train.images.flatten(1).numpy())), "each once"
