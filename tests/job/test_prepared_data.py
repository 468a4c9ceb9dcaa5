"""A run resumes with the data that it had, wherever they lie, and says so if they are others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import trainer
from tests.checkpoint.saving import about
from tests.pictures import picture
from trainer.checkpoint import store
from trainer.config.schema import CheckpointConfig
from trainer.errors import RunFailed, UserError
from trainer.host.notes_board import SealedBoard
from trainer.job import prepared_data
from trainer.worker.checkpoints import Checkpoints

OPTIONS = """
    tracking=none execution.threads=1 verbosity=normal epochs=1 checkpoint.background=false data.batch_size=8
    validation=false checkpoint.every_steps=2 checkpoint.every_epochs=null launch.nproc=1 execution.log_every=1
""".split()
RUN = (
    *"+recipe=resnet50_imagefolder model=convnet ~model.zero_init_residual data.image_size=32 data.cache=none".split(),
    *OPTIONS,
)
DIGITS = ("+recipe=digits_lenet", "limit_train_batches=4", *OPTIONS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``run`` seems to have been killed after update 4 of 5 over the images in ``images``; no test changes them."""
    folder = tmp_path_factory.mktemp("killed")
    for split, count in (("train", 20), ("val", 1)):
        for label, name in enumerate("ab"):
            (folder / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                picture(label, number, 20, 20).save(folder / "images" / split / name / f"{number:02d}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer.run([*RUN, "data.root=images", "hydra.run.dir=run"])
    is_killed(folder / "run")
    assert [path.name for path in store.found(folder / "run" / "checkpoints")][:1] == ["step-000000004"]
    return folder


@pytest.fixture
def here(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, on another place."""
    shutil.copytree(killed, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def is_killed(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.all
def test_other_data_are_refused_before_anything_is_touched(here: Path) -> None:
    (here / "images" / "train" / "a" / "00.png").rename(here / "images" / "train" / "b" / "zz.png")
    before = files(here)
    for path in ("auto", "run/checkpoints/step-000000002", "run"):
        folder = "other" if path == "run" else "run"
        with pytest.raises(
            UserError,
            match=(
                r"resume: the data are others than those of .*step-00000000[24]: their fingerprint was .*, is "
                r".*Type instead: the data of before, or resume\.allow_changes=true"
            ),
        ):
            trainer.run([*RUN, "data.root=images", f"hydra.run.dir={folder}", f"resume={path}"])
        assert files(here) == before


def test_other_data_may_be_asked_for_and_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "images" / "train" / "a" / "00.png").rename(here / "images" / "train" / "b" / "zz.png")
    run, older = [*RUN, "data.root=images", "hydra.run.dir=run"], "resume=run/checkpoints/step-000000002"
    result = trainer.run([*run, older, "resume.allow_changes=true"])
    assert result.steps == 5 and "changed, matters the data: their fingerprint was" in said(capsys)
    assert trainer.run([*run, "resume=run/checkpoints/step-000000004"]).steps == 5, "it is of the other data"


def test_the_same_data_at_another_place_and_time_are_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "images").rename(here / "moved")
    for path in (here / "moved").rglob("*.png"):
        os.utime(path, (1, 1))
    result = trainer.run([*RUN, f"data.root={here}/moved", "hydra.run.dir=run", "resume=auto"])
    assert result.steps == 5 and "the data: their" not in said(capsys)


@pytest.mark.all
def test_the_fingerprint_is_taken_once_by_the_parent_and_not_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = tmp_path / "taken"
    monkeypatch.setenv("TAKEN", str(taken))
    run = [*DIGITS, "data._target_=tests.job.counted_data.Counted", "launch.nproc=2", "hydra.run.dir=run"]
    trainer.run(run)
    assert taken.read_text() == f"{os.getpid()}\n"
    [newest, *_] = store.found(tmp_path / "run" / "checkpoints")
    assert len(store.about(newest).data) == 32
    is_killed(tmp_path / "run")
    assert not trainer.run([*run, "resume=auto", "plan=true"]).error
    assert taken.read_text() == f"{os.getpid()}\n"
    trainer.run([*run, "resume=run/checkpoints/step-000000002"])
    assert taken.read_text() == 2 * f"{os.getpid()}\n"
    trainer.run([*run, "hydra.run.dir=without", "checkpoint=none", "checkpoint.every_steps=null"])
    assert taken.read_text() == 2 * f"{os.getpid()}\n"


def test_what_a_newer_trainer_tells_besides_is_left_out() -> None:
    told = json.loads(about(3))
    newer = {**told, "device": "tpu", "watched": {**told["watched"], "why": "it is the best"}}
    assert store.parse_about(json.dumps(newer).encode(), "checkpoint.json") == store.parse_about(
        about(3), "checkpoint.json"
    )
    for of_another_kind in ("[]", "7", '"text"', '{"watched": 7}', "null"):
        with pytest.raises(UserError, match="it cannot be read"):
            store.parse_about(of_another_kind.encode(), "checkpoint.json")


@pytest.mark.all
def test_a_checkpoint_of_before_fingerprints_is_gone_on_from(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = json.loads(about(3))
    del old["data"]
    assert store.parse_about(json.dumps(old).encode(), "checkpoint.json").data == ""
    with pytest.raises(UserError, match="it tells a value of another kind"):
        store.parse_about(json.dumps({**old, "data": 3}).encode(), "checkpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(prepared_data, "_fingerprint", lambda ready: "")
        trainer.run([*RUN, "data.root=images", "hydra.run.dir=old"])
    (here / "images" / "train" / "a" / "00.png").rename(here / "images" / "train" / "b" / "zz.png")
    assert (
        trainer.run([*RUN, "data.root=images", "hydra.run.dir=old", "resume=old/checkpoints/step-000000002"]).steps == 5
    )


@pytest.mark.all
def test_data_that_are_drawn_or_streamed_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What random images are depends on the size of the batch, and what a stream yields is not known."""
    monkeypatch.chdir(tmp_path)
    random = """
        data=random_images data.image_size=28 data.num_classes=10 model.image_size=28 model.in_channels=3
        data.batches=4
    """.split()
    trainer.run([*DIGITS, *random, "hydra.run.dir=run"])
    [newest, *_] = store.found(tmp_path / "run" / "checkpoints")
    assert store.about(newest).data == ""


def test_a_source_of_ones_own_whose_fingerprint_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = [*DIGITS, "data._target_=tests.job.counted_data.Counted", "hydra.run.dir=run"]
    with pytest.raises(RunFailed, match=r"tests\.job\.counted_data\.Counted broke in fingerprint, .*KeyError: 'TAKEN'"):
        trainer.run(run)


def test_the_first_worker_that_is_left_knows_the_fingerprint() -> None:
    """Host 0 has taken it; where its worker is lost, one of another host writes checkpoint.json."""
    board = SealedBoard(dist.HashStore(), b"secret")
    workers = []
    for rank, told in enumerate(("0123", "")):
        seat: Any = SimpleNamespace(rank=rank, size=2, local_size=2, store=board)
        workers.append(Checkpoints(Path("none"), CheckpointConfig(), seat, True, 9, 9, {"data": told}, 0.0))
    assert [worker._known()["data"] for worker in workers] == ["0123", "0123"]
