"""Reference flowers come in the archive's order, or in one fixed shuffle which is said; never class by class."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.pictures import config, flowers_102
from trainer.config.schema import EmbeddedFlowersData, Flowers102Data
from trainer.data.images.listing import Listing
from trainer.data.sets.flowers import EmbeddedFlowers, Flowers102
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [
        (Flowers102, Flowers102Data, "102flowers.tgz is not there"),
        (EmbeddedFlowers, EmbeddedFlowersData, "drawn flowers have no archive"),
    ],
)
def test_without_the_archive_there_is_one_fixed_shuffle(kind: type, declared: type, said: str, tmp_path: Path) -> None:
    options = {key: value for key, value in asdict(declared()).items() if key != "root"}
    by_class = Listing.of_files([f"{n}.jpg" for n in range(1020)], np.repeat(np.arange(102), 10))
    source = kind(**options, root=str(tmp_path)) if kind is Flowers102 else kind(**options)
    assert source._ordered(by_class, "embedded") is by_class and source._shuffled() == "", "the default"
    options["order"] = "archive"
    first, again = (
        kind(**options, **({"root": str(tmp_path)} if kind is Flowers102 else {}))._ordered(by_class, "embedded")
        for _ in range(2)
    )
    assert len(set(first.labels[:32].tolist())) > 20 and sorted(first.labels.tolist()) == by_class.labels.tolist()
    assert first.labels.tolist() == again.labels.tolist()
    assert [int(first.files[f].removesuffix(".jpg")) // 10 for f in first.file] == first.labels.tolist()
    source.options.order = "archive"
    assert said in source._shuffled() and "one fixed shuffle" in source._shuffled()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: b"", "cannot be read"),
        (lambda whole: b"<html>404 Not Found</html>", "cannot be read"),
        (lambda whole: whole[: len(whole) // 2], "cannot be read"),
        (lambda whole: b"PK\3\4" + whole, "cannot be read"),
        (lambda whole: gzip.compress(bytes(10240)), "lacks 2 of 2 training images: image_00004.jpg; image_00001.jpg"),
    ],
    ids=["empty", "text", "cut off", "zip", "of nothing"],
)
def test_an_archive_that_tells_no_order_is_refused(
    damage: Callable[[bytes], bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    folder = flowers_102(tmp_path, [102, 7, 1, 7, 30, 12], [4, 1], [3], [6, 2, 5]) / "flowers-102"
    archive = folder / "102flowers.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("image_00001.jpg", "image_00004.jpg"):
            tar.add(folder / "jpg" / name, f"jpg/{name}")
    source = Flowers102(**config(Flowers102Data, root=str(tmp_path), cache="none", order="archive", download=False))
    train = source.listings(source.facts(1))[0]
    assert [Path(train.files[n]).name for n in train.file] == ["image_00001.jpg", "image_00004.jpg"], "not as listed"
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(UserError, match=said) as refused:
        source.listings(source.facts(1))
    assert refused.value.instead == "data.order=listed, or fetch the archive anew"
