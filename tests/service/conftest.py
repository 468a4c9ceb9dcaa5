"""Runs in a queue that are small shell scripts: what the runner starts is not looked into."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from trainer.service import api
from trainer.service.messages import Choices
from trainer.service.queue import Queue, Slots, Submission
from trainer.service.submitting import Submitter
from trainer.service.tokens import Tokens

SCRIPT = Path(__file__).with_name("fake_run.py")


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """An empty queue."""
    found = Queue(tmp_path / "home")
    yield found
    found.close()


@pytest.fixture
def add(queue: Queue, tmp_path: Path) -> Callable[..., int]:
    """Put a run of :mod:`tests.service.fake_run` into the queue: ``add("work", seconds)``; returns its number."""

    numbers = count()

    def put(*words: object, **values: Any) -> int:
        folder = tmp_path / f"run{next(numbers)}"
        (folder / "engine").mkdir(parents=True)
        run = Submission(
            name=folder.name,
            folder=str(folder),
            log=str(folder / "engine" / "log"),
            words=list(map(str, words)),
            command=[sys.executable, str(SCRIPT)],
            started_in=str(tmp_path),
            environment=dict(os.environ),
            grace_s=5.0,
            max_lost=1000,
        )
        return queue.add([replace(run, **values)])[0]

    return put


@pytest.fixture
def tokens(queue: Queue) -> Tokens:
    return Tokens(queue.folder)


@pytest.fixture
def client(queue: Queue, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    from trainer.cli.queue_verbs import done

    submitter = Submitter(queue.folder, tmp_path, ["digits_lenet"], quota=1)
    monkeypatch.setattr("trainer.service.engine.start_runner", lambda folder: None)
    service = api.Service(
        queue.folder, tokens, Slots((0, 1), (), 1 << 30), Choices(recipes={}, groups={}), submitter, done, "trainer-1"
    )
    app = api.made(service)
    with TestClient(app, base_url="http://localhost:8080", raise_server_exceptions=False) as found:
        yield found


@pytest.fixture
def owner(tokens: Tokens) -> dict[str, str]:
    return {"authorization": f"Bearer {tokens.make('owner')}"}
