"""The queue's file: one transaction each, the same key is the same run, and nobody else may read it."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.service.queue import FILE, QUEUED, RUNNING, Queue


def test_it_is_for_its_user_alone(queue: Queue) -> None:
    assert stat.S_IMODE((queue.folder / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((queue.folder / "runs").stat().st_mode) == 0o700


def test_the_same_key_is_the_same_run(queue: Queue, add: Callable[..., int]) -> None:
    assert add("work", 1, key="a") == add("work", 2, key="a") != add("work", 1, key="b")
    assert len(queue.newest(10)) == 2


def test_of_two_who_move_a_run_one_does(queue: Queue, add: Callable[..., int]) -> None:
    numbers = [add("work", 1) for _ in range(20)]
    moved: list[int] = []

    def move() -> None:
        mine = Queue(queue.folder)
        moved.extend(number for number in numbers if mine.move(number, (QUEUED,), state=RUNNING))
        mine.close()

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == numbers


def test_first_come_those_of_higher_priority(queue: Queue, add: Callable[..., int]) -> None:
    low, high, same = add("work", 1), add("work", 1, priority=2), add("work", 1)
    assert [run.number for run in queue.in_states((QUEUED,))] == [high, low, same]


def test_a_run_does_not_show_its_environment(queue: Queue, add: Callable[..., int]) -> None:
    assert "VERY-SECRET" not in repr(queue.run(add("work", 1, environment={"TOKEN": "VERY-SECRET"})))


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="the queue cannot be used"):
        Queue(tmp_path / "file")
    (tmp_path / "home" / "runs").mkdir(parents=True)
    (tmp_path / "home" / FILE).write_text("this is no database, and it is long enough to be read as one" * 40)
    with pytest.raises(UserError, match="the queue cannot be used"):
        Queue(tmp_path / "home")
