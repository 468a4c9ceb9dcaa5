"""Persistables are those of one save, also where a worker that was stopped wakes while another one saves in its
place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.checkpoint import durable_folder, store, streamed
from trainer.errors import UserError
from trainer.strategies.pserver.protocol import snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "persistables"


def written(folder: Path, rank: int) -> Path:
    """The one server's part of a save by a worker, whose rank is its value."""
    own = snapshot.begin(folder, rank)
    snapshot.write_part(own, 0, {"p": streamed.of(np.full(3, float(rank)))}, {"tables": {}, "dense": []})
    return own


def saved_by(folder: Path) -> float:
    [part] = snapshot.read(folder).parts
    return float(part["p"][0])


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_who_wakes_and_begins_leaves_another_ones_save_alone(folder: Path) -> None:
    other = written(folder, 1)
    snapshot.begin(folder, 0)
    snapshot.complete(other, 1, folder)
    assert saved_by(folder) == 1.0 and left(folder) == {"persistables"}


@pytest.mark.parametrize("first", [0, 1])
def test_who_wakes_and_completes_its_own_takes_nothing_from_another(folder: Path, first: int) -> None:
    own = {rank: written(folder, rank) for rank in (0, 1)}
    for rank in (first, 1 - first):
        snapshot.complete(own[rank], 1, folder)
        assert saved_by(folder) == rank
    assert left(folder) == {"persistables"}


@pytest.mark.parametrize("older", [False, True])
def test_two_that_complete_at_the_same_moment_both_end_well(folder: Path, older: bool, monkeypatch: Any) -> None:
    if older:
        snapshot.complete(written(folder, 2), 1, folder)
    own, rename = {rank: written(folder, rank) for rank in (0, 1)}, os.rename

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(os, "rename", rename)
        snapshot.complete(own[1], 1, folder)
        rename(*arguments)

    monkeypatch.setattr(os, "rename", meanwhile)
    snapshot.complete(own[0], 1, folder)
    assert saved_by(folder) == 0.0 and left(folder) == {"persistables"}


def test_place_that_cannot_be_taken_is_an_error(folder: Path, monkeypatch: Any) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError("no")

    own = written(folder, 0)
    monkeypatch.setattr(os, "rename", refuses)
    with pytest.raises(PermissionError):
        snapshot.complete(own, 1, folder)
    folder.mkdir()
    (folder / "mine.txt").touch()
    with pytest.raises(UserError, match="not a snapshot"):
        snapshot.complete(own, 1, folder)


def test_parts_that_a_dead_worker_left_are_removed_when_the_run_goes_on_and_not_by_who_retires_checkpoints(
    folder: Path,
) -> None:
    written(folder, 1)
    newest = folder.with_name("step-000000002")
    durable_folder.write(newest, store.ABOUT, lambda path: path.write_text("{}"))
    durable_folder.complete(newest, [store.ABOUT], store.FORMAT)
    store.retire(folder.parent, newest, 1, 0)
    assert left(folder) == {"persistables.by-1.partial", newest.name}
    store.forget_unfinished(folder.parent)
    assert left(folder) == {newest.name}


def test_parts_of_a_folder_whose_name_goes_on_are_not_taken_for_its_own(folder: Path) -> None:
    written(folder.with_name("persistables2"), 0)
    with pytest.raises(UserError) as error:
        snapshot.read(folder)
    assert error.value.why == "there is no such folder"
    written(folder, 1)
    with pytest.raises(UserError, match=r"persistables\.by-1\.partial holds parts"):
        snapshot.read(folder)
