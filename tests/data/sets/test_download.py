"""Data sets that are downloaded: each is there whole or not at all, whoever is killed or looks in the middle."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import cifar, config, flowers_102, mnist, silent
from trainer.config import schema
from trainer.data import download
from trainer.data.sets.cifar import Cifar10
from trainer.data.sets.flowers import Flowers102
from trainer.data.sets.mnist import Mnist
from trainer.data.source import DataSource, Facts


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product catches it."""


def packed(archive: Path, *folders: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for folder in folders:
            tar.add(folder, folder.name)
    for folder in folders:
        shutil.rmtree(folder)


def flowers_site(site: Path) -> Path:
    flowers_102(site, [102, 7, 1, 7], [4, 1], [3])
    packed(site / "flowers-102" / "102flowers.tgz", site / "flowers-102" / "jpg")
    return site / "flowers-102"


def cifar_site(site: Path) -> Path:
    cifar(site)
    packed(site / "cifar-10-python.tar.gz", site / "cifar-10-batches-py")
    return site


def mnist_site(site: Path) -> Path:
    return mnist(site, packed=True) / "MNIST" / "raw"


SETS: dict[str, tuple[Callable[[Path], Path], type[DataSource], type]] = {
    "flowers102": (flowers_site, Flowers102, schema.Flowers102Data),
    "cifar10": (cifar_site, Cifar10, schema.Cifar10Data),
    "mnist": (mnist_site, Mnist, schema.MnistData),
}


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataSource]:
    """A source of the data set whose site answers; its files come from a folder."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    site_of, source, options = SETS[request.param]
    site = site_of(tmp_path / "site")

    def fetch_file(address: str, path: Path, size: int, sha256: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site / path.name, path)

    monkeypatch.setattr(download, "fetch_file", fetch_file)
    monkeypatch.setattr(download, "unreachable", lambda address: "")
    settings = {"root": str(tmp_path / "data"), "download": True, "on_missing": "error"}
    return lambda **more: source(**config(options, **settings, **more))


def prepared(source: DataSource) -> Facts:
    return source.prepare(source.facts(1), silent)


each = pytest.mark.parametrize("make", SETS, indirect=True)


@each
def test_a_set_that_is_being_unpacked_is_not_there(
    make: Callable[..., DataSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def looked_at(member: Any) -> None:
        seen.append(make().facts(1).kind)

    _in_the_middle(monkeypatch, looked_at)
    assert prepared(make()).kind == "real"
    assert set(seen) <= {"download"}
    assert make().facts(1).kind == "real"


@each
def test_a_set_whose_unpacking_was_killed_is_unpacked_again(
    make: Callable[..., DataSource], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(member: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "rmtree", lambda *_, **__: None)  # a process that is killed tidies nothing up
        _in_the_middle(patch, killed)
        try:
            prepared(make())
        except Killed:
            assert make().facts(1).kind == "download"
    facts = prepared(make())
    splits = make().open(facts)
    assert facts.kind == "real" and len(splits.train) == facts.train_samples and splits.val is not None  # type: ignore[arg-type]
    assert not list((tmp_path / "data").rglob("*.unpacking"))


def _in_the_middle(patch: pytest.MonkeyPatch, do: Callable[[Any], None]) -> None:
    """Whoever unpacks an archive does something after a third of a file and before the next ones."""
    makefile, files = tarfile.TarFile.makefile, []

    def slowly(self: tarfile.TarFile, member: tarfile.TarInfo, path: Any) -> None:
        makefile(self, member, path)
        files.append(path)
        if len(files) == 3:
            with open(path, "r+b") as file:
                file.truncate(member.size // 3)
            do(member)
            makefile(self, member, path)

    patch.setattr(tarfile.TarFile, "makefile", slowly)


@each
def test_a_set_that_another_process_has_unpacked_meanwhile_is_not_unpacked_again(
    make: Callable[..., DataSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = make().facts(1)
    prepared(make())
    monkeypatch.setattr(download, "fetch_file", None)
    assert make().prepare(facts, silent).kind == "real"


@pytest.mark.parametrize("make", ["flowers102"], indirect=True)
@pytest.mark.parametrize("cache", ["auto", "ram", "none"])
def test_images_that_are_to_be_downloaded_are_not_asked_for_their_sizes(
    make: Callable[..., DataSource], cache: str
) -> None:
    facts = make(cache=cache).facts(1)
    assert (facts.kind, facts.cached, facts.train_samples) == ("download", False if cache == "none" else None, 1020)
    assert make(cache=cache).fingerprint(facts)
    assert prepared(make(cache=cache)).train_samples == 2


@pytest.mark.parametrize("make", ["mnist"], indirect=True)
def test_a_part_of_a_file_beside_the_whole_packed_one_does_no_harm(
    make: Callable[..., DataSource], tmp_path: Path
) -> None:
    prepared(make())
    (tmp_path / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\0\0")
    assert prepared(make()).train_samples == 30
