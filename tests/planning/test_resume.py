"""Which checkpoint a run goes on from, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer
from tests.refusals import Case, cases
from trainer.config.keys import is_of, sections
from trainer.errors import UserError
from trainer.host import versions
from trainer.planning.resume import _average
from trainer.planning.resume_changes import ORDER, ORDER_AT_SERVERS, SAME_VALIDATION, differences

BASE = """
    +recipe=digits_lenet tracking=none execution.threads=1 verbosity=quiet limit_train_batches=4
    limit_val_batches=1 epochs=2 checkpoint.background=false checkpoint.every_steps=2
""".split()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that seems to have been killed after its last checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("resume")
        patch.chdir(folder)
        trainer.run([*BASE, "hydra.run.dir=run"])
        status = folder / "run" / "status.json"
        status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
        yield folder


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        trainer.run([*BASE, *overrides])
    return str(refused.value)


@pytest.fixture
def here(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(interrupted)
    return interrupted / "run"


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


CANNOT_GO_ON = """
    hydra.run.dir=run
        holds a run that did not come to its end; its newest checkpoint is step-000000008
        => resume=auto to go on (or resume=fresh to write over it)
    resume=auto optimizer.lr=0.5
        optimizer.lr was 0.05, is 0.5 => the values of before, or resume.allow_changes=true
    resume=auto ema.decay=0.9
        ema.decay was None, is 0.9 (not carried over: ema.decay=0.9 needs an average of the weights, and the
        checkpoint has none: it begins with the weights of update 8)
    resume=auto data.batch_size=8 | an update has 8 samples, and had 32
    resume=auto epochs=1 | epochs was 2, is 1
    resume=auto epochs=1 resume.allow_changes=true | step-000000008 is after update 8 => epochs=3
    resume=auto max_steps=2 resume.allow_changes=true | 2 updates: | step-000000008 is after update 8 => max_steps=9
    resume=auto strategy=local_sgd launch.nproc=2 data.global_batch_size=32 | is of strategy=single => strategy=single
    resume=auto strategy=pserver_sync launch.nproc=1 strategy.wire=int8
        is of strategy=single, and with these options of pserver_sync the updates would be others => strategy=single
    resume=auto strategy=pserver_async | is of strategy=single => strategy=single
    resume=auto strategy=pserver_sync launch.nproc=1 strategy.clip_norm=1 | strategy.clip_norm was None, is 1
    resume=auto sampler.padding=contiguous | sampler.padding was strided, is contiguous
    resume=nowhere => resume=FOLDER of a run or of a checkpoint
    resume=run/checkpoints/step-000000099 | there is no whole checkpoint
    resume=/ | there is no whole checkpoint
"""


@pytest.mark.parametrize("case", cases("", CANNOT_GO_ON), ids=lambda case: case.typed)
def test_what_cannot_go_on_is_refused_and_nothing_is_touched(here: Path, case: Case) -> None:
    before = files(here)
    refused = refusal("hydra.run.dir=run", *case.typed.split())
    said, _, instead = refused.partition(". Type instead: ")
    assert all(part in said for part in case.says) and instead.startswith(case.instead), refused
    assert files(here) == before


def test_what_makes_no_difference_may_change(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.run(
        [*BASE, "hydra.run.dir=run", "resume=auto", "plan=true", "tracking.run_name=again", "data.num_workers=1"]
    )
    assert "lacks" not in capsys.readouterr().out


def test_the_plan_names_other_versions_than_those_of_the_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = versions.installed()
    now = {**before, "torch": "9.9.0+cu999", "numpy": f"{before.get('numpy')}+another.build"}
    monkeypatch.setattr(versions, "installed", lambda: now)
    result = trainer.run([*BASE, "verbosity=normal", "hydra.run.dir=run", "resume=auto", "plan=true"])
    said = f"other versions torch was {before.get('torch')}, is 9.9.0+cu999: numbers may differ"
    assert not result.error and said in " ".join(capsys.readouterr().out.split())


CHANGED = ("optimizer.lr=0.5", "data.num_workers=1", "execution.log_every=7", "tracking.run_name=again")


def test_the_plan_splits_what_differs_into_what_matters_and_what_does_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.run(
        [*BASE, *"verbosity=normal hydra.run.dir=run resume=auto plan=true resume.allow_changes=true".split(), *CHANGED]
    )
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line.startswith("changed")] == [
        "changed, matters optimizer.lr was 0.05, is 0.5",
        "changed, harmless data.num_workers was auto, is 1",
        "changed, harmless execution.log_every was 20, is 7",
        "changed, harmless tracking.run_name was None, is again",
        "changed, harmless verbosity was quiet, is normal",
    ]


def test_a_refusal_names_what_matters_and_besides_what_does_not(here: Path) -> None:
    said = refusal("hydra.run.dir=run", "resume=auto", *CHANGED)
    matters, besides = said.split("; harmless differences: ")
    assert matters.endswith("in what matters: optimizer.lr was 0.05, is 0.5")
    assert besides.startswith(
        "data.num_workers was auto, is 1; execution.log_every was 20, is 7; tracking.run_name was None, is "
        "again. Type instead: the values of before"
    )


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (None, None, []),
        (0.9, 0.5, []),
        (None, 0.9, ["the checkpoint has none: it begins with the weights of update 8"]),
        (0.9, None, ["the moving average of the weights, which ema.decay=null does not need"]),
    ],
)
def test_what_becomes_of_the_average_is_told(before: float | None, now: float | None, said: list[str]) -> None:
    about: Any = SimpleNamespace(config={"ema": {"decay": before}}, step=8)
    config: Any = SimpleNamespace(ema=SimpleNamespace(decay=now))
    told = list(_average(config, about))
    assert len(told) == len(said) and all(line.endswith(end) for line, end in zip(told, said, strict=True))


def test_a_plan_lists_why_a_run_cannot_go_on(here: Path) -> None:
    result = trainer.run([*BASE, "hydra.run.dir=run", "resume=auto", "plan=true", "optimizer.lr=0.5"])
    assert "optimizer.lr was 0.05, is 0.5" in result.error


def test_without_a_checkpoint_auto_begins_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = trainer.run([*BASE, "hydra.run.dir=new", "resume=auto", "epochs=1"])
    assert result.steps == 4
    assert "resume=auto: there is no checkpoint in" in " ".join(capsys.readouterr().out.split())


def test_fresh_writes_over_it(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here, tmp_path / "run")
    result = trainer.run(
        [*BASE, f"hydra.run.dir={tmp_path / 'run'}", "resume=fresh", "checkpoint=none", "checkpoint.every_steps=null"]
    )
    assert result.steps == 8
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_run_that_is_done_may_be_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert trainer.run([*BASE, "hydra.run.dir=run"]).status == "done"


def test_newer_checkpoints_are_set_aside_where_a_run_goes_on_from_an_older_one(here: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(here, run)
    older = run / "checkpoints" / "step-000000006"
    trainer.run([*BASE, f"hydra.run.dir={run}", f"resume={older}", "max_steps=7", "resume.allow_changes=true"])
    assert (run / "checkpoints" / "aside-step-000000008").is_dir()
    assert (run / "checkpoints" / "latest").read_text() != "step-000000008\n"
    assert b"\0" not in (run / "metrics.jsonl").read_bytes()


def test_another_number_of_workers_is_another_order_where_padding_comes_before_the_shuffle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["hydra.run.dir=run", "sampler.padding=contiguous", "launch=in_process", "device=cpu"]
    trainer.run([*BASE, *run])
    again = [*run, "resume=run/checkpoints/step-000000006", "plan=true", "sampler.drop_last=true"]
    assert not trainer.run([*BASE, *again]).error
    assert (
        "sampler.padding=contiguous repeats samples before it shuffles"
        in trainer.run([*BASE, *again, "sampler.pad=false"]).error
    )
    other = trainer.run(
        [*BASE, *again, "launch=forkserver", "launch.nproc=2", "data.batch_size=16", "strategy=collective"]
    )
    assert "the run had 1 worker and sampler.pad=true" in other.error


def test_how_a_command_follows_its_job_is_no_difference() -> None:
    before = {"launch": {"nproc": 1, "wait": False, "dry_run": True, "apply": False}}
    now = {"launch": {"nproc": 2, "wait": True, "dry_run": False, "apply": True}}
    assert [key for key, _ in differences(before, now, False)] == ["launch.nproc"]


def test_a_key_of_a_newer_trainer_is_no_difference_while_it_has_its_default() -> None:
    before, now = (
        {"model": {"_target_": "m"}},
        {"model": {"_target_": "m", "init": "default"}, "data": {"order": "listed"}},
    )
    assert list(differences(before, now, False)) == []
    assert [key for key, _ in differences(before, {"model": {"_target_": "m", "init": "reference"}}, False)] == [
        "model.init"
    ]


OTHER_SAMPLES = """_target_ batches dense_max dense_min draw_seed drawn_size fresh hash_size image image_size label
    label_kind label_separator labels labels_below max_depth max_file_mib mean normalize num_classes on_bad path
    per_class species split split_seed std test_fraction train_rows train_split val val_batches val_fraction val_path
    val_resize val_rows val_size val_split"""
"""Keys of ``data`` on which it depends what a validation measures."""


def test_a_new_key_of_the_data_is_listed_as_one_that_changes_the_validation_or_not() -> None:
    keys = [key.path for section in sections() for key in section.keys]
    data = {key for key in keys if key.startswith("data.")}
    assert {key for key in data if not is_of(key, SAME_VALIDATION)} == {f"data.{n}" for n in OTHER_SAMPLES.split()}
    listed = (*SAME_VALIDATION, *ORDER, *ORDER_AT_SERVERS)
    assert not [name for name in listed if not any(is_of(key, [name]) for key in keys)], "keys that are gone"
