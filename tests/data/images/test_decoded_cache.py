"""Runs that share the cache of decoded images keep what the others use, and remove what nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pictures import config, image_folder, silent
from trainer.config import schema
from trainer.data import prepared
from trainer.data.images import cache
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.source import Splits
from trainer.host import in_use


@pytest.fixture(autouse=True)
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    with in_use.left_at_the_end():
        yield tmp_path / "cache" / "decoded"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[int], Splits]:
    """What a run has prepared that divides one and the same folder by this ``data.split_seed``."""
    root = image_folder(tmp_path / "d") / "train"

    def run(seed: int) -> Splits:
        options = {"image_size": 32, "cache": "ram", "val_fraction": 0.3, "split_seed": seed}
        source = ImageFolder(**config(schema.ImageFolderData, root=str(root), **options))
        return source.open(source.prepare(source.facts(1), silent))

    return run


def first_images(splits: Splits) -> list[torch.Tensor]:
    return [split.image(0) for split in (splits.train, splits.val)]  # type: ignore[union-attr]


def test_what_a_run_uses_is_not_removed_by_a_run_with_another_split(run: Callable[[int], Splits]) -> None:
    ours = run(0)
    others = run(1)
    assert all(image.any() for image in [*first_images(ours), *first_images(others)])


def test_what_no_run_uses_any_more_is_removed(run: Callable[[int], Splits], decoded: Path) -> None:
    run(0)
    before = set(decoded.rglob("pixels.bin"))
    in_use.HERE.leave()
    first_images(run(1))
    after = set(decoded.rglob("pixels.bin"))
    assert len(after) == 2 and not before & after


def test_of_two_runs_that_begin_together_the_second_takes_what_the_first_has_made(
    run: Callable[[int], Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, first = prepared.locked, []

    def after_the_first_run(target: Path) -> AbstractContextManager[None]:
        if not first:
            monkeypatch.setattr(prepared, "locked", locked)
            first.append(run(0))
        return locked(target)

    monkeypatch.setattr(prepared, "locked", after_the_first_run)
    second = run(0)
    assert [split.cache for split in (first[0].train, first[0].val)] == [second.train.cache, second.val.cache]  # type: ignore[union-attr]
    assert all(image.any() for image in first_images(first[0]))


def test_what_is_removed_before_a_run_holds_it_is_made_anew(
    run: Callable[[int], Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_once, removed = cache.prepare_once, []

    def removed_at_once(folder: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        noted = prepare_once(folder, make)
        if not removed:
            removed.append(folder)
            in_use.remove_unused(folder, prepared.MARKER, folder.with_name("aside"))
            assert not folder.exists()
        return noted

    monkeypatch.setattr(cache, "prepare_once", removed_at_once)
    assert all(image.any() for image in first_images(run(0)))


def test_a_mark_that_was_replaced_while_it_was_waited_for_is_not_held(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    ours = in_use.InUse()

    def replaced(descriptor: int, kind: int) -> None:
        mark.unlink()
        mark.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_use.fcntl, "flock", replaced)
        assert not ours.hold(mark)
    assert ours.hold(mark)
    ours.leave()
    assert not ours.hold(tmp_path / "other")


def test_a_folder_stays_while_another_process_holds_it_and_after_it_was_killed_it_goes(tmp_path: Path) -> None:
    folder, aside = tmp_path / "folder", tmp_path / "aside"
    folder.mkdir()
    (folder / "mark").touch()
    code = (
        "import sys; from pathlib import Path; from trainer.host import in_use; "
        "print(in_use.HERE.hold(Path(sys.argv[1])), flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, folder / "mark"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with other, other.stdin or nullcontext():
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        in_use.remove_unused(folder, "mark", aside)
        assert folder.exists()
        other.kill()
    in_use.remove_unused(folder, "mark", aside)
    assert not folder.exists() and not aside.exists()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mark").touch()

    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(in_use.fcntl, "flock", no_locks)
    assert in_use.InUse().hold(tmp_path / "folder" / "mark")
    in_use.remove_unused(tmp_path / "folder", "mark", tmp_path / "aside")
    assert (tmp_path / "folder" / "mark").exists()
