"""Each life of a run is told of, also one that could not tell its end itself."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.host import files
from trainer.run_folder import lives
from trainer.run_folder.lives import LifeRecord
from trainer.run_folder.reset_files import copy_points


def status(run_dir: Path, state: str, step: int, life: int = 1, seconds: float = 2e9) -> None:
    """What a worker, or a recorder, has left."""
    path = run_dir / "status.json"
    path.write_text(json.dumps({"state": state, "step": step, "life": life}))
    os.utime(path, (seconds, seconds))


def test_a_life_that_ended_tells_so_itself(tmp_path: Path) -> None:
    lives.begin(tmp_path, (), 0, 2, "a=1")
    lives.end(tmp_path, "failed", 7, "broke")
    lives.end(tmp_path, "killed", 9)
    [life] = lives.past(tmp_path)
    assert (life.how, life.last, life.why, life.workers, life.command) == ("failed", 7, "broke", 2, "a=1")
    assert life.began and life.ended and lives.number(tmp_path) == 1
    assert lives.begin(tmp_path, lives.past(tmp_path), 5, 3, "b").number == lives.number(tmp_path) == 2


@pytest.mark.parametrize(
    ("state", "how"),
    [("killed", "killed"), ("running", "lost"), ("starting", "lost"), (None, "lost"), ("preempted", "preempted")],
)
def test_a_life_that_was_killed_is_told_of_by_its_status(tmp_path: Path, state: str | None, how: str) -> None:
    lives.begin(tmp_path, (), 0, 1, "x")
    if state is not None:
        status(tmp_path, state, 12)
        (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 14}\n{"step": 9')
    [life] = lives.past(tmp_path)
    assert (life.how, life.last) == (how, 0 if state is None else 14)
    assert bool(life.ended) == (state is not None)
    assert lives.past(tmp_path) == (life,), "to look changes nothing"


def test_a_life_that_came_to_nothing_takes_no_end_from_the_one_before(tmp_path: Path) -> None:
    lives.begin(tmp_path, (LifeRecord(1, "2001-01-01T00:00:00+00:00", how="killed", last=30),), 20, 1, "x")
    status(tmp_path, "running", 30, life=1, seconds=1e9)
    assert [(life.how, life.last, life.ended) for life in lives.past(tmp_path)][1] == ("lost", 20, "")
    status(tmp_path, "killed", 30, life=1)  # by the recorder, which was there already
    assert [(life.how, life.last) for life in lives.past(tmp_path)][1] == ("killed", 20)


@pytest.mark.parametrize("left", ["", "[", "{}", "[3]", '[{"what": 1}]'])
def test_a_damaged_file_is_a_life_of_which_nothing_is_known(tmp_path: Path, left: str) -> None:
    (tmp_path / "lives.json").write_text(left)
    lives.end(tmp_path, "done", 3)
    assert lives.past(tmp_path) == (LifeRecord(1, "", how="lost"),) and lives.number(tmp_path) == 1


def test_of_another_run_only_lives_before_the_checkpoint_count() -> None:
    all_of_them = tuple(LifeRecord(n, "", first=first) for n, first in ((1, 0), (2, 80), (3, 60)))
    assert lives.until(all_of_them, 60) == (all_of_them[0], replace(all_of_them[2], number=2))


def test_what_a_run_takes_along_from_another_is_of_the_checkpoints_time(tmp_path: Path) -> None:
    source, run, said = tmp_path / "a", tmp_path / "b", list[str]()
    source.mkdir()
    (source / "metrics.jsonl").write_text("1\n2\n3\n")
    run.mkdir()
    copy_points(source, run, 4, said.append)
    assert (run / "metrics.jsonl").read_text() == "1\n2\n" and not said
    copy_points(source, run, 99, said.append)
    assert (run / "metrics.jsonl").read_text() == "1\n2\n3\n" and "not whole" in said[0]


def test_a_log_goes_on_and_no_link_is_followed(tmp_path: Path) -> None:
    log, link, precious = tmp_path / "log", tmp_path / "link", tmp_path / "precious"
    precious.write_text("mine")
    link.symlink_to(precious)
    assert files.go_on(log) == 0 and log.read_text() == ""
    log.write_text("before\n")
    assert files.go_on(log) == 7 and log.read_text() == "before\n"
    assert files.go_on(link) == 0 and not link.is_symlink() and precious.read_text() == "mine"
