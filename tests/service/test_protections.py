"""What the service does where the disk is full, the queue is locked, or somebody asks for what is not theirs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.small_disk import small_disk
from trainer.errors import RunFailed
from trainer.service import queue as of_queue
from trainer.service.queue import ALIVE, CANCEL, OVER, WAITING, Queue
from trainer.service.tokens import Tokens

NOBODY = 65534
SECRET = "hunter2-of-the-run"


def test_a_queue_that_is_locked_is_an_answer_and_nothing_is_changed(
    client: TestClient, queue: Queue, owner: dict[str, str], add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = add("work", 1)
    monkeypatch.setattr(of_queue, "BUSY_S", 0.1)
    other = sqlite3.connect(queue.folder / of_queue.FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = client.post(f"/api/runs/{number}/cancel", headers=owner)
    assert answer.status_code == 503 and "locked" in answer.json()["error"] and "retry-after" in answer.headers
    assert client.get("/api/runs", headers=owner).json()["runs"][0]["asked"] == "", "who reads is not held up"
    other.execute("ROLLBACK")
    assert client.post(f"/api/runs/{number}/cancel", headers=owner).status_code == 200
    other.close()


def test_what_is_in_the_queue_stays_when_the_disk_is_full(tmp_path: Path, add: Callable[..., int]) -> None:
    with small_disk(tmp_path / "disk", "400k") as disk:
        queue = Queue(disk / "home")
        run = of_queue.Submission(
            name="x", folder="f", log="l", words=[], command=[], started_in="/", config="y" * 20_000
        )
        kept = [queue.add([run])[0]]
        with pytest.raises(RunFailed, match=r"full|disk"):
            while len(kept) < 100:
                kept.append(queue.add([run])[0])
        assert [one.number for one in queue.newest(200)] == kept
        assert queue.start_of(kept[-1])[1] == run.config
        queue.close()
        again = Queue(disk / "home")
        assert [one.number for one in again.newest(200)] == kept
        again.close()


@pytest.mark.parametrize("state", [*WAITING, *ALIVE, *OVER])
def test_cancel_ends_what_waits_or_lives_and_refuses_what_has_ended(
    client: TestClient, queue: Queue, owner: dict[str, str], add: Callable[..., int], state: str
) -> None:
    number = add("work", 1)
    queue.set(number, state=state)
    answer = client.post(f"/api/runs/{number}/cancel", headers=owner)
    run = queue.run(number)
    assert run is not None and run.state == state, "the runner moves it, and not who asks"
    if state in OVER:
        assert answer.status_code == 409 and state in answer.json()["error"] and run.asked == ""
    else:
        assert answer.status_code == 200 and run.asked == CANCEL


def test_runs_of_another_token_can_be_seen_and_not_be_changed(
    client: TestClient, queue: Queue, tokens: Tokens, add: Callable[..., int]
) -> None:
    number = add("work", 1, key="api/ann/x")
    other = add("work", 1, key=f"api/ann/{SECRET}", environment={"DB_PASSWORD": SECRET})
    ben = {"authorization": f"Bearer {tokens.make('ben')}"}
    queue.set(number, state="done", code=0)
    for verb in ("cancel", "resume", "retry"):
        assert client.post(f"/api/runs/{number}/{verb}", headers=ben).status_code == 403
    for path in ("", "/logs", "/metrics", "/files"):
        assert client.get(f"/api/runs/{number}{path}", headers=ben).status_code == 200
    run = queue.run(number)
    assert run is not None and (run.state, run.asked) == ("done", "")
    keys = {run["number"]: run["key"] for run in client.get("/api/runs", headers=ben).json()["runs"]}
    assert keys == {number: "x", other: "(hidden)"}, "a key is a name, unless it is a secret of the run"


def test_the_command_that_repeats_a_run_does_without_the_queue(
    client: TestClient, owner: dict[str, str], add: Callable[..., int]
) -> None:
    of_queue = ("launch=queue", "launch.wait=false", "launch.once='api/owner/a'", "launch.cores=1", "hydra.run.dir=r")
    number = add("+recipe=digits_lenet", "epochs=1", *of_queue, "launch.nproc=2")
    command = client.get(f"/api/runs/{number}", headers=owner).json()["command"]
    assert command == "python -m trainer +recipe=digits_lenet epochs=1 launch.nproc=2"


def test_a_run_that_is_queued_again_counts_for_the_quota(
    client: TestClient, queue: Queue, tokens: Tokens, add: Callable[..., int]
) -> None:
    first, second = add("work", 1, key="api/ann/x"), add("work", 1, key="api/ann/y")
    ann = {"authorization": f"Bearer {tokens.make('ann')}"}
    for number in (first, second):
        queue.set(number, state="failed", code=1)
    assert client.post(f"/api/runs/{first}/resume", headers=ann).status_code == 200
    assert client.post(f"/api/runs/{second}/retry", headers=ann).status_code == 429, "the quota here is 1"
    run = queue.run(second)
    assert run is not None and run.state == "failed"


def test_a_revoked_token_is_refused_at_once_and_its_login_too(client: TestClient, tokens: Tokens) -> None:
    token = tokens.make("ann")
    ann = {"authorization": f"Bearer {token}"}
    session = client.post("/login", json={"token": token}).json()
    assert client.get("/api/runs", headers={"x-csrf-token": session["csrf"]}).status_code == 200
    tokens.revoke("ann")
    assert client.get("/api/runs", headers=ann).status_code == 401
    assert client.get("/api/runs", headers={"x-csrf-token": session["csrf"]}).status_code == 401
    assert client.post("/login", json={"token": token}).status_code == 401


def test_tokens_that_cannot_be_read_open_nothing(client: TestClient, tokens: Tokens, owner: dict[str, str]) -> None:
    tokens.path.write_text("{")
    answer = client.get("/api/runs", headers=owner)
    assert answer.status_code == 503 and str(tokens.path) not in answer.text
    assert client.post("/login", json={"token": "x"}).status_code in (422, 503)


def test_no_answer_has_a_secret_of_a_run(
    client: TestClient, queue: Queue, owner: dict[str, str], add: Callable[..., int]
) -> None:
    number = add("work", f"tracking.uri=http://me:{SECRET}@host/", environment={**os.environ, "DB_PASSWORD": SECRET})
    run = queue.run(number)
    assert run is not None
    folder = Path(run.folder)
    for name in ("config.yaml", "notes.txt", "result.json", "status.json", "a.csv"):
        (folder / name).write_text(f'{{"password": "{SECRET}", "metrics": {{}}}}\n')
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "note": "{SECRET}"}}\n')
    Path(run.log).write_text(f"the password is {SECRET}\n")
    queue.set(number, state="failed", code=1, reason=f"login failed: {SECRET}")
    files = [one["path"] for one in client.get(f"/api/runs/{number}/files", headers=owner).json()]
    assert {"metrics.jsonl", "notes.txt"} <= set(files)
    below = ["", "/logs", "/logs?follow=true", "/metrics", "/files", *(f"/files/{path}" for path in files)]
    for path in ["/api/runs", "/api/choices", "/openapi.json", *(f"/api/runs/{number}{one}" for one in below)]:
        answer = client.get(path, headers=owner)
        assert answer.status_code == 200 and SECRET not in answer.text, path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another account")
def test_another_account_reads_neither_the_queue_nor_the_tokens(
    queue: Queue, tokens: Tokens, owner: dict[str, str], add: Callable[..., int], tmp_path: Path
) -> None:
    add("work", 1)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder.stat().st_uid == os.getuid() and "pytest" in folder.name:
            folder.chmod(0o755)
    files = [str(queue.folder / of_queue.FILE), str(tokens.path)]
    reads = 'for file; do if cat "$file" >/dev/null; then echo read; else echo refused; fi; done'
    done = subprocess.run(
        ["/bin/sh", "-c", reads, "sh", "/etc/passwd", *files],
        capture_output=True,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    assert done.stdout.split() == ["read", "refused", "refused"], done.stderr
