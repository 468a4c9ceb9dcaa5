"""A forkserver that is stopped tells nobody how its processes have ended; the launcher sees that they are gone."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.entries import stops_its_forkserver
from tests.launch.test_open_files import workers
from trainer.errors import Died
from trainer.launch import process
from trainer.launch.forkserver import launch
from trainer.launch.rendezvous import Rendezvous

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(autouse=True)
def goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process, "GONE_S", 1.0)
    yield
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGCONT)  # type: ignore[attr-defined]


def test_run_ends_although_its_forkserver_is_stopped(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    result = launch([workers(stops_its_forkserver, 1)], False, tmp_path, Rendezvous())
    assert result.of["worker"][0] == multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == before, "Python would wait for them at its end"


def test_process_that_is_killed_is_missed_although_its_forkserver_is_stopped(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(Died, match="worker 0 ended with exit code 255"):
        launch([workers(stops_its_forkserver, 1)], True, tmp_path, Rendezvous())
    assert multiprocessing.active_children() == before
