"""The best weights are those of the training that a run has gone through, whatever way it came back to a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer
from tests import runs
from tests.checkpoint.saving import save
from tests.checkpoint.test_identity import DIGITS, EVERYTHING, back_at, check_equal
from trainer.checkpoint import durable_folder, store, tensor_tree
from trainer.checkpoint.best_weights import BestOfCheckpoints, put_back
from trainer.errors import UserError

RUN = (*DIGITS, *EVERYTHING, "best.metric=val/loss", "execution.val_every_steps=2", "max_steps=12")
WORSE = ("optimizer.lr=30", "resume.allow_changes=true", "on_nonfinite=skip")
"""The loss of no later validation is lower."""
BEST = Path("checkpoints") / "best.safetensors"


def weights_after(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of one worker's run, from its part of the checkpoint of that update."""
    folder = store.folder_of(run / "checkpoints", step)
    part: dict[str, torch.Tensor] = tensor_tree.read(folder / store.part_of(0), ["model"])["model"]
    return part


def check_same(found: Path, weights: dict[str, torch.Tensor]) -> None:
    told = load_file(found)
    assert {name for name, value in weights.items() if not torch.equal(value, told[name])} == set(), found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "whole"
    trainer.run([*RUN, f"hydra.run.dir={folder}"])
    assert runs.read(folder / "result.json")["best_step"] == 12, "each validation is better than the one before"
    check_same(folder / BEST, weights_after(folder, 12))
    return folder


@pytest.mark.all
def test_training_that_was_given_up_leaves_no_best_weights(whole: Path, tmp_path: Path) -> None:
    """Another training goes on from update 5, in the run's own folder and in another one, and is worse."""
    own, other = tmp_path / "own", tmp_path / "other"
    shutil.copytree(whole, own)
    checkpoint = store.folder_of(own / "checkpoints", 5)
    trainer.run([*RUN, *WORSE, f"resume={checkpoint}", f"hydra.run.dir={other}"])
    trainer.run([*RUN, *WORSE, f"resume={checkpoint}", f"hydra.run.dir={own}"])
    for run in (own, other):
        result = runs.read(run / "result.json")
        assert result["best_step"] == 4 and result["steps"] == 12
        check_same(run / BEST, weights_after(whole, 4))
    aside = own / "checkpoints" / "aside-step-000000012"
    trainer.run([*RUN, f"resume={aside}", f"hydra.run.dir={tmp_path}/aside"])
    check_same(tmp_path / "aside" / BEST, weights_after(whole, 12))


def test_run_that_was_killed_as_its_next_life_began_has_its_best_weights(whole: Path, tmp_path: Path) -> None:
    """Its status tells of no update then."""
    source, other = tmp_path / "source", tmp_path / "other"
    shutil.copytree(whole, source)
    starting = {"state": "starting", "doing": "", "step": 0, "total": 12, "metrics": {}, "life": 2}
    (source / "status.json").write_text(json.dumps(starting))
    trainer.run([*RUN, *WORSE, "max_steps=14", f"resume={source}", f"hydra.run.dir={other}"])
    assert runs.read(other / "result.json")["best_step"] == 12
    check_same(other / BEST, weights_after(source, 12))


def test_best_weights_that_all_checkpoints_share_and_that_are_damaged_do_not_cost_the_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint is taken, and it is said."""
    run = tmp_path / "run"
    back_at(whole, 7, run)
    for path in run.rglob(BEST.name):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    for folder in store.found(run / "checkpoints"):
        if not (folder / BEST.name).exists():
            shutil.rmtree(folder)  # of a time before there were best weights
    trainer.run([*RUN, f"hydra.run.dir={run}", "resume=auto"])
    said = capsys.readouterr().out
    assert (
        f"passed over: {run}/checkpoints/step-000000007/best.safetensors: its content is not what was written" in said
    )
    assert "step-000000007 is taken all the same: only the best weights so far are damaged" in said
    assert f"removed: {run / BEST}, damaged" in said
    check_equal(whole, run)
    newest = store.folder_of(run / "checkpoints", 12)
    (newest / store.part_of(0)).write_bytes(b"")
    for folder in store.found(run / "checkpoints")[1:]:
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="none of its checkpoints is whole"):
        store.newest_to_go_on(run / "checkpoints", print)


def test_another_metric_chooses_its_best_weights_anew(whole: Path, tmp_path: Path) -> None:
    """The lowest loss so far is no accuracy."""
    shutil.copytree(whole, tmp_path / "run")
    checkpoint = store.folder_of(tmp_path / "run" / "checkpoints", 11)
    trainer.run(
        [
            *RUN,
            "best.metric=val/acc5",
            "resume.allow_changes=true",
            f"resume={checkpoint}",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    assert runs.read(tmp_path / "run" / "result.json")["best_step"] == 12


POISONED = ("model._target_=tests.faults.poisoned.Poisoned", "+model.at=[7]", "on_nonfinite=rewind")
DEADLY = ("model._target_=tests.faults.deadly.Deadly", "+model.at=[7]", "+model.rank=1", "launch.nproc=2")


@pytest.mark.all
@pytest.mark.parametrize(
    ("how", "told", "checkpoint"),
    [
        ("rewind", POISONED, 0),
        ("death", DEADLY, 4),
        pytest.param("rewind", POISONED, 4, marks=pytest.mark.long),
        pytest.param("death", DEADLY, 0, marks=pytest.mark.long),
    ],
)
def test_life_that_begins_again_begins_with_the_best_weights_of_its_checkpoint(
    how: str, told: tuple[str, ...], checkpoint: int, tmp_path: Path
) -> None:
    """Validations after the checkpoint were better, and belong to updates that are given up."""
    folder = f"+model.folder={tmp_path}" if how == "rewind" else f"+model.deaths={tmp_path}"
    every = f"checkpoint.every_steps={checkpoint or 100}"
    command = (
        *DIGITS,
        *told,
        folder,
        "~model.in_channels",
        "~model.image_size",
        *EVERYTHING,
        every,
        "best.metric=val/loss",
    )
    noting = ("execution.val_every_steps=1", "max_steps=9", "callbacks=[{_target_:tests.checkpoint.noting.Noting}]")
    run = tmp_path / "run"
    ended = runs.trainer(*command, *noting, "hydra.run.dir=run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = runs.read(run / "result.json")
    assert result["rewinds"] + result["restarts"] == 1
    assert (run / "improved.6").exists(), "before it was given up"
    assert (run / f"found.{checkpoint + 1}").exists() == bool(checkpoint)
    if checkpoint:
        best = store.about(store.folder_of(run / "checkpoints", checkpoint)).best_step
        assert best and 0 < best <= checkpoint
        check_same(run / f"found.{checkpoint + 1}", load_file(run / f"improved.{best}"))
    else:
        assert "best.safetensors, of a validation after the checkpoint" in ended.stdout
    check_same(run / BEST, load_file(run / f"improved.{result['best_step']}"))


def held(checkpoints: Path, step: int) -> int:
    return (store.folder_of(checkpoints, step) / "best.safetensors").stat().st_ino


def test_checkpoints_hold_the_same_file_until_there_is_a_better_one(whole: Path) -> None:
    """A link takes no room; the checksum is that of the file."""
    checkpoints = whole / "checkpoints"
    assert held(checkpoints, 4) == held(checkpoints, 5) != held(checkpoints, 6) == held(checkpoints, 7)
    assert not (store.folder_of(checkpoints, 1) / "best.safetensors").exists(), "nothing was validated yet"


def test_where_a_disk_has_no_links_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background, where better ones may have come meanwhile."""
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    best, folder = tmp_path / BEST, store.folder_of(tmp_path / "checkpoints", 1)
    best.parent.mkdir()
    best.write_bytes(b"weights")
    held = BestOfCheckpoints()
    held.hold(folder)
    assert not (durable_folder.partial_of(folder) / store.BEST).exists(), "the training does not wait for the copy"
    (tmp_path / "better").write_bytes(b"better")
    (tmp_path / "better").rename(best)
    held.seal(folder)
    save(best.parent, 1)
    assert (store.check(folder) / store.BEST).read_bytes() == b"weights"
    put_back(tmp_path, folder, print)
    assert best.read_bytes() == b"weights"


def test_best_weights_count_for_no_shared_file(tmp_path: Path) -> None:
    """The rule that keeps a checkpoint more is about parts which are increments."""
    (tmp_path / "best").write_text("weights")
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)
        os.link(tmp_path / "best", store.folder_of(tmp_path, step) / store.BEST)
    save(tmp_path, 3, keep_last=2)
    assert [store.step_of(path.name) for path in store.found(tmp_path)] == [3, 2]


def test_nothing_is_followed_and_nothing_removed_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    place, precious = tmp_path / "run" / BEST, tmp_path / "precious"
    place.parent.mkdir(parents=True)
    precious.write_text("mine")
    place.symlink_to(precious)
    put_back(tmp_path / "run", None, said.append)
    assert not os.path.lexists(place) and precious.read_text() == "mine" and len(said) == 1
    put_back(tmp_path / "run", None, said.append)
    assert len(said) == 1


def test_checkpoint_that_could_not_hold_them_does_not_cost_the_run_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, place: Any) -> None:
        if hasattr(place, "write"):
            place.write(source.read(100))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    run = tmp_path / "run"
    trainer.run([*RUN, f"hydra.run.dir={run}"])
    assert (
        "the best weights so far are not in this checkpoint: No space left on device"
        in (run / "workerlog.0").read_text()
    )
    newest, older = store.found(run / "checkpoints")[:2]
    assert not (newest / BEST.name).exists() and durable_folder.whole(newest, store.FORMAT) == newest
    before, said = (run / BEST).read_bytes(), list[str]()
    put_back(run, newest, said.append)
    assert (run / BEST).read_bytes() == before and not said
    put_back(run, older, said.append)
    assert not (run / BEST).exists(), "they are of a later validation than that checkpoint"
