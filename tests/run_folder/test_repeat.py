"""The repeat line is the command that repeats a run: as it was started, from where its numbers began."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.run_config import RunConfig
from trainer.host import torchrun
from trainer.run_folder import repeat
from trainer.run_folder.lives import LifeRecord

TYPED = ["--config-dir", "mine", "+recipe=x", "hydra.run.dir=run"]
PYTHON = ["python", "-m", "trainer"]


def lives(*commands: str) -> list[LifeRecord]:
    return [LifeRecord(number + 1, "", command=command) for number, command in enumerate(commands)]


def config(path: str | None, allow_changes: bool = False) -> RunConfig:
    return RunConfig.of({}).changed(resume={"path": path, "allow_changes": allow_changes})


def words(path: str | None, typed: list[str], past: list[LifeRecord], allow_changes: bool = False) -> list[str]:
    return repeat.words(config(path, allow_changes), typed, past, Path("run"))


def test_run_that_went_on_in_its_own_folder_is_repeated_from_its_beginning() -> None:
    past = lives("+recipe=x", "+recipe=x hydra.run.dir=run resume=auto")
    again = [*PYTHON, *TYPED, "resume=fresh"]
    assert words("auto", [*TYPED, "resume.path=auto"], past) == again
    assert words("run/checkpoints/step-4", [*TYPED, "resume=run/checkpoints/step-4"], past) == again
    assert words("auto", [*TYPED, "resume=auto"], past[:1]) == again  # typed for a folder that held nothing


def test_run_that_went_on_from_another_one_goes_on_from_there_again() -> None:
    typed = [*TYPED, "resume=other"]
    assert words("other", typed, lives("a", "b")) == [*PYTHON, *typed]
    assert words(None, TYPED, lives("a")) == [*PYTHON, *TYPED]


@pytest.mark.parametrize("past", [lives("a", "a resume.allow_changes=true", "a"), lives("a", "b")])
def test_no_single_command_repeats_lives_that_may_differ(past: list[LifeRecord]) -> None:
    assert words("auto", [*TYPED, "resume=auto"], past, allow_changes=len(past) == 2) == []


@pytest.mark.parametrize(
    ("size", "started"),
    [
        ("2", "torchrun --nproc-per-node=2 -m trainer"),
        (
            "4",
            (
                "torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=10.0.0.1 "
                "--master-port=29500 -m trainer"
            ),
        ),
    ],
)
def test_under_torchrun_the_command_is_torchruns(size: str, started: str) -> None:
    told = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert torchrun.is_rank(told) and " ".join(repeat.starter(environment=told)) == started
    assert repeat.starter(environment={}) == PYTHON
