"""The tracker of docs/adding.md works as the page says."""

from __future__ import annotations

import csv
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pages import write_files
from tests.runs import mlflow_runs, read, trainer
from tests.tracking.test_trackers import in_file, lives


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files in an empty folder outside the checkout."""
    folder = tmp_path_factory.mktemp("page")
    write_files("adding.md", folder)
    return folder


@pytest.fixture
def tracker(example: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the page."""
    monkeypatch.syspath_prepend(str(example))
    yield importlib.import_module("my_package.trackers").Csv
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def in_table(path: Path) -> Counter[tuple[str, int]]:
    """How often each name and update is in the table."""
    with path.open(newline="") as table:
        return Counter((row["name"], int(row["update"])) for row in csv.DictReader(table))


@pytest.mark.all
def test_the_page_s_command_fills_mlflow_and_the_table(example: Path) -> None:
    argv = ["--config-dir", "mine", "+recipe=my_recipe", "tracking=[mlflow,csv]", "hydra.run.dir=run"]
    done = trainer(*argv, "tracking.log_model=false", "epochs=1", cwd=example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert in_table(example / "run" / "points.csv") == in_file(example / "run")
    [run] = mlflow_runs(example)
    assert run.info.run_id == read(example / "run" / "result.json")["run_id"]
    plan = " ".join(done.stdout.split())
    assert "tracking mlflow, csv" in plan and f"csv {example}/run/points.csv" in plan


def test_the_table_has_every_point_of_two_lives_once(tracker: Any, tmp_path: Path) -> None:
    lives(partial(tracker, file="points.csv"), tmp_path)  # type: ignore[arg-type]
    assert in_table(tmp_path / "points.csv") == in_file(tmp_path)
