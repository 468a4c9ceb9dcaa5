"""A disk that is full for a while: the training goes on, says so, and has all its points in the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.faults.filler import FILLER
from tests.runs import points, trainer
from tests.small_disk import small_disk

BASE = [
    "+recipe=digits_lenet",
    "limit_train_batches=12",
    "epochs=3",
    "execution.log_every=1",
    "execution.threads=1",
    "execution.deterministic=true",
    "checkpoint.every_steps=4",
    "tracking=none",
    "hydra.run.dir=run",
]
FILLS = "callbacks=[{_target_:tests.faults.filler.Filler,at:AT,until:UNTIL}]"
HOW = {
    "in this process": ["launch=in_process"],
    "two processes": ["launch.nproc=2"],
    "a parameter server": ["strategy=pserver_sync", "launch.servers=1", "launch.workers=2"],
}
CASES = [pytest.param(how, marks=pytest.mark.long) if how == "two processes" else how for how in HOW]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk(tmp_path / "small", "4m") as place:
        yield place


def told(run: Path) -> list[list[tuple[int, float]]]:
    """What metrics.jsonl has of losses."""
    return [points(run, name) for name in ("train/loss", "val/loss")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the run that has room."""

    @cache
    def run(how: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        done = trainer(*BASE, *HOW[how], cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder / "run"

    return run


@pytest.mark.all
@pytest.mark.parametrize("how", CASES)
def test_a_disk_that_is_full_for_a_while_costs_no_point_and_no_update(
    how: str, small: Path, undisturbed: Callable[[str], Path]
) -> None:
    whole = undisturbed(how)
    fills = FILLS.replace("AT", "6").replace("UNTIL", "21")  # checkpoints, the first validation and its best model
    done = trainer(*BASE, *HOW[how], fills, cwd=small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told(small / "run") == told(whole) and len(told(small / "run")[0]) == 36
    weights = [run / "model.safetensors" for run in (small / "run", whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert done.stdout.count("metrics.jsonl is written again; no point is missing") == 1
    assert not list((small / "run").rglob(".*-*"))


@pytest.mark.all
@pytest.mark.parametrize("how", CASES)
def test_a_disk_that_stays_full_ends_the_run_by_a_sentence_and_it_goes_on_later(
    how: str, small: Path, undisturbed: Callable[[str], Path]
) -> None:
    whole = undisturbed(how)
    done = trainer(*BASE, *HOW[how], FILLS.replace("AT", "14").replace("UNTIL", "99"), cwd=small)
    run = small / "run"
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^failed: worker 0: .*No space left on device", done.stderr, re.MULTILINE), done.stderr
    assert "resume=auto" in done.stderr.splitlines()[-1]
    (run / FILLER).unlink()
    again = trainer(*BASE, *HOW[how], "resume=auto", "resume.allow_changes=true", cwd=small)
    assert again.returncode == 0, again.stdout + again.stderr
    assert told(run) == told(whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
