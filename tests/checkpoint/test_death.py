"""A run that dies while it saves, at any moment and with any loss of what was not synced: there is a whole checkpoint,
and the next life can save again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint import disk, saving
from trainer.checkpoint import store

SCENARIOS = {
    "the first of a run": ([], (20, 1, 1)),
    "a newer one": ([(10, 1, 1)], (20, 1, 1)),
    "a newer one of three workers": ([(10, 1, 3)], (20, 1, 3)),
    "the same update again": ([(20, 1, 1)], (20, 2, 1)),
    "the same update with fewer workers": ([(20, 1, 3)], (20, 2, 1)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_wherever_a_run_dies_while_it_saves_it_can_go_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (step, life, workers) = SCENARIOS[name]
    run = tmp_path / "run"
    run.mkdir()
    for older in before:
        saving.save(run / "checkpoints", *older)
    with disk.recorded(run) as recorder:
        saving.save(run / "checkpoints", step, life, workers)
    assert len(recorder.moments) > 20
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    known = {(s, n) for s, n, _ in [*before, (step, life, workers)]}
    for death in disk.deaths(recorder, tmp_path):
        place, where = death.folder, death.where
        newest = store.newest_whole(place / "checkpoints")
        assert newest is not None or not before, f"nothing is left: {where}"
        found = saving.read(newest) if newest is not None else None
        assert found is None or found in known, where
        if death.at_the_end:
            assert found == (step, life), f"what was saved is lost: {where}"
        store.forget_unfinished(place / "checkpoints")
        assert newest is None or saving.read(store.newest_whole(place / "checkpoints") or place) == found, where
        for again in (step, step + 10):
            saving.save(place / "checkpoints", again, 3)
            assert saving.read(store.newest_whole(place / "checkpoints") or place) == (again, 3), where
        left = sorted(path.name for path in (place / "checkpoints").iterdir())
        assert left == ["latest", store.folder_of(place, step + 10).name], where
        assert (place / "checkpoints" / "latest").read_text().strip() == left[1]
