"""The API lets in who has a token, answers no file outside of a run's folder, and takes no override that is code."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from trainer.errors import UserError
from trainer.service import allowed
from trainer.service.queue import Queue
from trainer.service.tokens import FILE, Tokens


def test_tokens_are_kept_hashed_for_this_user_alone_and_can_be_revoked(tokens: Tokens) -> None:
    token = tokens.make("ann")
    file = tokens.path
    assert file.name == FILE and stat.S_IMODE(file.stat().st_mode) == 0o600 and token not in file.read_text()
    caller = tokens.caller(token)
    assert caller is not None and caller.name == "ann" and tokens.caller(token + "x") is None
    cookie, csrf = tokens.login(caller)
    assert tokens.logged_in(cookie, csrf) == caller
    assert tokens.logged_in(cookie, "") is None and tokens.logged_in(cookie + "0", csrf) is None
    tokens.revoke("ann")
    assert tokens.caller(token) is None and tokens.logged_in(cookie, csrf) is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer \xff\u00e9"}, 401),
        ({"host": "evil.example:8080"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_strangers_and_other_sites_are_refused(client: TestClient, owner: Any, headers: Any, status: int) -> None:
    sent = headers if status == 401 else {**owner, **headers}
    encoded = {key: value.encode("latin-1") for key, value in sent.items()}
    for path in ("/api/runs", "/openapi.json"):
        answer = client.get(path, headers=encoded)
        assert answer.status_code == status and "error" in answer.json()
    assert client.get("/api/runs", headers=owner).status_code == 200


def test_a_cookie_alone_opens_nothing(client: TestClient, tokens: Tokens) -> None:
    session = client.post("/login", json={"token": tokens.make("owner")}, headers={"origin": "http://localhost:8080"})
    cookie = session.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 401
    assert client.post("/api/runs/1/cancel").status_code == 401
    assert client.get("/api/runs", headers={"x-csrf-token": session.json()["csrf"]}).status_code == 200
    assert client.post("/login", json={"token": "wrong"}).status_code == 401


def test_a_body_that_is_too_large_is_refused_also_in_chunks(client: TestClient, owner: dict[str, str]) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * 1024

    assert client.post("/api/runs", content=b" " * 70_000, headers=owner).status_code == 413
    assert client.post("/api/runs", content=chunks(), headers=owner).status_code == 413
    strange = client.post("/api/runs", content=b'{"overrides": ["\\ud800"]}', headers=owner)
    assert strange.status_code in (400, 422) and "error" in strange.json()


def test_only_files_of_the_run_are_answered_with_secrets_hidden(
    client: TestClient, queue: Queue, owner: dict[str, str], add: Callable[..., int], tmp_path: Path
) -> None:
    number = add("work", 1, environment={**os.environ, "MY_PASSWORD": "hunter2secret"})
    run = queue.run(number)
    assert run is not None
    folder = Path(run.folder)
    (folder / "notes.txt").write_text("it is hunter2secret\n")
    (tmp_path / "outside.txt").write_text("outside")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "linked").symlink_to(tmp_path)
    (folder / ".hidden").write_text("x")
    os.mkfifo(folder / "fifo")
    files = f"/api/runs/{number}/files"
    assert client.get(f"{files}/notes.txt", headers=owner).text == "it is (hidden)\n"
    for path in (
        "link.txt",
        "linked/outside.txt",
        "../outside.txt",
        "%2e%2e/outside.txt",
        "/etc/passwd",
        ".hidden",
        "fifo",
        "%00",
        "engine",
        "a%ff",
        "..%2foutside.txt",
    ):
        assert client.get(f"{files}/{path}", headers=owner).status_code == 404, path
    assert [one["path"] for one in client.get(files, headers=owner).json()] == ["notes.txt"]
    assert "hunter2secret" not in client.get("/api/runs", headers=owner).text


def test_runs_are_listed_followed_and_cancelled_by_whom_they_belong_to(
    client: TestClient, queue: Queue, tokens: Tokens, owner: dict[str, str], add: Callable[..., int]
) -> None:
    first, second = add("work", 1), add("work", 1, key="api/ann/x")
    ann = {"authorization": f"Bearer {tokens.make('ann')}"}
    runs = client.get("/api/runs", headers=ann).json()["runs"]
    assert [(run["number"], run["position"], run["may"]) for run in runs] == [(first, 0, []), (second, 1, ["cancel"])]
    assert client.post(f"/api/runs/{first}/cancel", headers=ann).status_code == 403
    again = client.post("/api/runs", json={"overrides": ["+recipe=digits_lenet"], "key": "x"}, headers=ann)
    assert again.json() == {"number": second, "new": False}
    more = client.post("/api/runs", json={"overrides": ["+recipe=digits_lenet"]}, headers=ann)
    assert more.status_code == 429
    assert client.get(f"/api/runs/{2**63 - 1}", headers=owner).status_code == 404
    queue.set(second, state="done", code=0)
    run = queue.run(second)
    assert run is not None
    Path(run.log).write_text("one\ntwo")
    followed = client.get(f"/api/runs/{second}/logs?follow=true", headers=owner).text
    assert [line for line in followed.splitlines() if line.startswith("data")] == [
        'data: "one"',
        'data: "two"',
        'data: "done"',
    ]


@pytest.mark.parametrize(
    "word",
    [
        "model._target_=os.system",
        "+model.x={_target_: os.system}",
        "model={_target_: os.system}",
        "hydra.run.dir=x",
        "hydra/launcher=x",
        "launch=slurm",
        "launch.setup=[ls]",
        "launch.options.wrap=ls",
        "launch.python=sh",
        "data.root=/etc",
        "data.root=../x",
        "data.root='a/../../x'",
        "data.root=~/x",
        "data.root=link/x",
        "data.root=${oc.env:HOME}",
        "data.root='${oc.env:HOME}'",
        "checkpoint.to=s3://x",
        "tracking.uri=http://x",
        "+recipe=../x",
        "recipe=digits_lenet",
        "optimizer.lr=1,2",
        "optimizer.lr=range(1,3)",
        "~model",
        "-m",
        "--config-dir=x",
        "callbacks=[{a: b}]",
        "model@x=lenet",
        "model=a/b",
        "mode=predict",
        "data.root=a\nb",
        "=",
        "",
        "data.transforms=[{_target_: os.system}]",
        "optimizer.lr='\ud800'",
        "strategy.transport=tcp",
        "debug=true",
    ],
)
def test_an_override_that_is_code_a_folder_or_an_address_is_refused(tmp_path: Path, word: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    good = ["+recipe=digits_lenet", "optimizer.lr=0.1", "model=lenet", "launch.nproc=2", "weights=a/model.safetensors"]
    assert allowed.check(good, ["digits_lenet"], tmp_path) == "digits_lenet"
    with pytest.raises(UserError):
        allowed.check([*good, word], ["digits_lenet"], tmp_path)


def test_the_page_has_no_code_from_elsewhere(client: TestClient, owner: dict[str, str]) -> None:
    for path in ("/", "/page.js", "/page.css"):
        answer = client.get(path)
        assert answer.status_code == 200 and "//" not in answer.text.replace("// ", "")
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get("/docs").status_code == 401 and client.get("/docs", headers=owner).status_code == 404
