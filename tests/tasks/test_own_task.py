"""The task of docs/adding.md runs as the page shows it: exact over 2 workers, and resumed as if it had not ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_pages import commands
from tests.pages import write_files
from tests.runs import read, trainer
from tests.tasks.test_runs import measured, validated

PLAIN = ("tracking=none", "precision=fp64", "checkpoint.every_steps=7", "checkpoint.keep_last=99")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_files("adding.md", folder)
    return folder


def run(example: Path, folder: str, *overrides: str) -> Path:
    [command] = [words for words in commands("adding.md") if "task=quantiles" in words]
    done = trainer(*command, *PLAIN, *overrides, f"hydra.run.dir={folder}", cwd=example, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return example / folder


@pytest.mark.all
def test_a_task_of_ones_own_is_exact_over_two_workers_and_resumable(example: Path) -> None:
    one, two = run(example, "one", "launch.nproc=1"), run(example, "two", "launch.nproc=2")
    assert read(one / "plan.json")["objective"]["task"] == "quantiles"
    assert validated(one).keys() == {"val/loss", "val/coverage", "val/width"} and validated(one)["val/coverage"] > 0.5
    resumed = run(example, "resumed", "launch.nproc=1", "resume=one/checkpoints/step-000000028")
    for other in (two, resumed):
        points = measured(one)[-len(measured(other)) :]
        assert len(points) == len(measured(other)) > 3
        for before, now in zip(points, measured(other), strict=True):
            assert now == pytest.approx(before, rel=1e-9, abs=1e-12)
