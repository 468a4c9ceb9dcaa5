"""Where a run writes and where MLflow keeps it is looked at before the start; nothing is written to find out."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shlex
import socket
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from alembic.script import ScriptDirectory
from mlflow.store.db.utils import _get_alembic_config, _get_latest_schema_revision

from tests.cli.conftest import Run
from tests.small_disk import small_disk
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError
from trainer.host import private
from trainer.host.folder_checks import check_folder
from trainer.planning import sqlite_store, tracking_store
from trainer.planning.key_checks import check_name
from trainer.planning.sqlite_store import Experiment
from trainer.planning.tracking_store import check_store, check_tracking, experiment_of, tracking_uri, try_store

DIGITS = "+recipe=digits_lenet"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing the user need root")


def mlflow(uri: str | None) -> TrackingConfig:
    return TrackingConfig(trackers={"mlflow": {}}, uri=uri)


# --- names ----------------------------------------------------------------------------------------------------------


NO_NAMES = ["", " ", "../../evil", "..", ".", "/etc/evil", "a//b", "a/../b", "a/", "x" * 201, "ü" * 101]
UNPRINTABLE = ["a\nb", "a\x1b[31mb", "a\u202eb", "a\0b"]


@pytest.mark.parametrize("name", [*NO_NAMES, *UNPRINTABLE])
def test_a_name_that_would_leave_the_outputs_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_name(name)
    check_name(re.fullmatch(r"name=(.+)", caught.value.instead)[1])  # type: ignore[index]


@pytest.mark.parametrize("name", ["digits", "my run", "team/digits", "Größe-1.0", "...x", "x" * 200])
def test_other_names_are_taken(name: str) -> None:
    check_name(name)


# --- folders --------------------------------------------------------------------------------------------------------


def refused(folder: Path, *says: str, needed: int = 1) -> None:
    above = next(p for p in folder.parents if os.path.isdir(p))
    before = sorted(above.glob("*")) if len(folder.parents) > 2 else []
    with pytest.raises(UserError) as caught:
        check_folder(folder, "hydra.run.dir", needed)
    assert str(caught.value).startswith("hydra.run.dir=")
    for part in says:
        assert part in str(caught.value), str(caught.value)
    assert not os.path.isdir(os.fsencode(folder).replace(b"\0", b"")), "nothing is made"
    assert len(folder.parents) <= 2 or sorted(above.glob("*")) == before


def test_folders_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    refused(tmp_path / "file" / "run", "file is a file")
    refused(tmp_path / ("x" * 256) / "run", "has 256 bytes", "takes 255")
    refused(tmp_path / ("ü" * 128), "has 256 bytes")
    refused(tmp_path.joinpath(*["x" * 200] * 20), "too long")
    refused(tmp_path / "a\0b", "NUL")
    refused(tmp_path / "loop" / "run", "cannot be looked at")
    refused(tmp_path / "nowhere", "cannot be looked at")
    refused(Path("/proc/run"), "/proc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop", "nowhere"]
    check_folder(tmp_path / "a" / "b" / "c", "hydra.run.dir")
    check_folder(tmp_path, "hydra.run.dir")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_of_somebody_else_is_refused(open_to_all: Path) -> None:
    theirs = open_to_all / "theirs"
    theirs.mkdir(mode=0o500)
    if os.geteuid() != 0:
        refused(theirs / "run", "may not be written by this user")
        return
    child = os.fork()
    if not child:  # as another user
        os.setgid(65534)
        os.setuid(65534)
        try:
            refused(theirs / "run", "may not be written by this user")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users can enter; every pytest that begins closes the folders of pytest to them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "small", "256k") as place:
        yield place


@ROOT
def test_a_full_disk_and_a_read_only_one_are_refused(small: Path, run: Run) -> None:
    refused(small / "run", "0.2 MiB are free", needed=1 << 20)
    check_folder(small / "run", "hydra.run.dir", 1 << 10)
    code, out, error = run(DIGITS, f"hydra.run.dir={small}/run", "tracking=none")
    assert code == 2 and "are free there" in error and error.count("\n") == 1
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    refused(small / "run", "read-only")
    code, out, _ = run(DIGITS, f"hydra.run.dir={small}/run", "plan=true", f"tracking.uri=sqlite:///{small}/mlflow.db")
    assert code == 2 and "this run would be refused" in out and "Plan of digits_lenet" in out
    assert "read-only" in out and "cannot be written" in out, "both reasons are listed"
    assert list(small.iterdir()) == []


# --- MLflow's address -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "says", "instead"),
    [
        ("foo://x", "knows no address that begins with foo://", "sqlite:///mlflow.db"),
        ("htp://host:5000", "htp://", "http://host:5000"),
        ("localhost:5000", "does not say how", "http://localhost:5000"),
        ("my-host:5000/mlflow", "does not say how", "http://my-host:5000/mlflow"),
        ("http://", "names no host", "http://127.0.0.1:5000"),
        ("http:/host", "is not written as an address", "http://host"),
        ("http://host:99999", "Port out of range", "http://127.0.0.1:5000"),
        ("http://[::1", "is no address", "http://127.0.0.1:5000"),
        ("./mlruns", "no longer keeps runs in folders", "sqlite:///mlruns/mlflow.db"),
        ("file:///tmp/mlruns", "no longer keeps runs in folders", "sqlite:////tmp/mlruns/mlflow.db"),
        ("mlflow.db", "no longer keeps runs in folders", "sqlite:///mlflow.db"),
        ("sqlite://mlflow.db", "three slashes", "sqlite:///mlflow.db"),
        ("sqlite:mlflow.db", "is not written as an address", "sqlite:///mlflow.db"),
        ("sqlite:///:memory:", "lost with the process", "sqlite:///mlflow.db"),
        ("sqlite:///nowhere/mlflow.db", "there is no folder", "sqlite:///mlflow.db"),
        ("sqlite:///folder", "is a folder", "sqlite:///folder/mlflow.db"),
        ("sqlite:///text.db", "is no SQLite database", "sqlite:///another.db"),
        ("sqlite:///newer.db", "of a newer MLflow", "sqlite:///another.db"),
        ("sqlite:///deleted.db", "was deleted", "tracking.experiment=digits_2"),
        ("postgresql+nobody://host/x", "needs the Python module nobody", "sqlite:///mlflow.db"),
    ],
)
def test_an_address_that_can_never_work_is_refused(
    uri: str, says: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text("no database " * 100)
    for name, version, stage in (
        ("newer", "ffffffffffff", "active"),
        ("deleted", next(iter(sqlite_store._revisions()[1])), "deleted"),
    ):
        with sqlite3.connect(tmp_path / f"{name}.db") as base:
            base.execute("CREATE TABLE alembic_version (version_num)")
            base.execute("INSERT INTO alembic_version VALUES (?)", (version,))
            base.execute("CREATE TABLE experiments (name, lifecycle_stage)")
            base.execute("INSERT INTO experiments VALUES ('digits', ?)", (stage,))
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(UserError) as caught:
        check_store(mlflow(uri), Experiment("digits"))
    assert says in str(caught.value) and instead in caught.value.instead, str(caught.value)
    proposed = caught.value.instead.removeprefix("tracking.uri=").partition(" (")[0]
    if "folder" not in says and says != "was deleted":  # whose folder is still to be made
        check_store(mlflow(proposed), Experiment("digits"))
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_addresses_that_work_or_may_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "empty.db").touch()
    for uri in (
        None,
        "http://127.0.0.1:1",
        "https://user:word@host/mlflow",
        f"sqlite:///{tmp_path}/new.db",
        "sqlite:///new.db",
        "sqlite:///empty.db",
        "databricks",
        "databricks://profile",
    ):
        check_store(mlflow(uri), Experiment("digits"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://user:word@x")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI=foo://.*@x") as caught:
        check_store(mlflow(None), Experiment("digits"))
    assert "word" not in str(caught.value)
    check_store(TrackingConfig(), Experiment("digits"))


@pytest.mark.parametrize("name", ["a#b", "50%41", "50%", "what?", "a?b=c", "x%3Fy", "plain", "a b+c@d:e", "\u00e4"])
def test_a_database_is_made_in_the_folder_whatever_the_folder_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SQLAlchemy, which MLflow gives the address to, and without a folder of another name beside it."""
    (folder := tmp_path / name).mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = tracking_uri(mlflow(None))
    check_store(mlflow(None), Experiment("digits"))
    check_store(mlflow(uri), Experiment("digits"))
    with sqlalchemy.create_engine(uri).begin() as base:
        base.execute(sqlalchemy.text("CREATE TABLE t (x)"))
    assert [p.name for p in folder.iterdir()] == ["mlflow.db"] and list(tmp_path.iterdir()) == [folder]
    if name in ("50%41", "what?"):  # as somebody types it
        with pytest.raises(UserError, match="is written as %") as caught:
            check_store(mlflow(f"sqlite:///{folder}/mlflow.db"), Experiment("digits"))
        assert caught.value.instead == f"tracking.uri={uri}"


def database(file: Path, version: str) -> None:
    with sqlite3.connect(file) as base:
        base.execute("CREATE TABLE alembic_version (version_num)")
        base.execute("INSERT INTO alembic_version VALUES (?)", (version,))


def test_a_database_of_an_older_mlflow_is_refused_with_the_command_that_upgrades_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "MOVES_WITHIN_S", 0.0)
    (folder := tmp_path / "it's #1").mkdir()
    newest = _get_latest_schema_revision()
    for revision in ScriptDirectory.from_config(_get_alembic_config("")).walk_revisions():
        file = folder / f"{revision.revision}.db"
        database(file, revision.revision)
        uri = sqlite_store.address(file)
        if revision.revision == newest:
            check_store(mlflow(uri), Experiment("digits"))
            continue
        with pytest.raises(UserError, match="of an older MLflow") as caught:
            check_store(mlflow(uri), Experiment("digits"))
        assert shlex.split(caught.value.instead) == ["mlflow", "db", "upgrade", uri]


def test_a_database_that_another_run_is_making_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database(tmp_path / "a.db", "bd07f7e963c5")

    def goes_on(seconds: float) -> None:
        with sqlite3.connect(tmp_path / "a.db") as base:
            base.execute("UPDATE alembic_version SET version_num = 'f5a4f2784254'")

    monkeypatch.setattr(sqlite_store.time, "sleep", goes_on)
    check_store(mlflow(f"sqlite:///{tmp_path}/a.db"), Experiment("digits"))


def test_the_experiment_that_a_platform_has_set_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    assert experiment_of(mlflow(None), "digits") == Experiment("digits")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "17")
    assert experiment_of(mlflow(None), "digits").id == "17"
    with pytest.raises(UserError, match="MLFLOW_EXPERIMENT_ID=17: there is no such experiment"):
        check_store(mlflow(f"sqlite:///{tmp_path}/new.db"), experiment_of(mlflow(None), "digits"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "abc")
    with pytest.raises(UserError, match="MLFLOW_EXPERIMENT_ID=abc: there is no such experiment"):
        check_store(mlflow("mysql+sqlite3://127.0.0.1/x"), experiment_of(mlflow(None), "digits"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert experiment_of(mlflow(None), "digits").name == "theirs"
    assert experiment_of(TrackingConfig(experiment="typed"), "digits").name == "typed", "what is typed counts first"


@pytest.mark.parametrize(
    ("name", "says"), [("x" * 501, "is longer than the 500 characters"), ("a\udcff", "which is not UTF-8")]
)
def test_an_experiment_of_a_platform_that_mlflow_does_not_take_is_refused(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(tmp_path / "a.db") as base:
        base.execute("CREATE TABLE experiments (name, experiment_id, lifecycle_stage)")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name)
    config: Any = SimpleNamespace(tracking=mlflow(f"sqlite:///{tmp_path}/a.db"), name="digits")
    with pytest.raises(UserError, match=f"MLFLOW_EXPERIMENT_NAME=.*{says}"):
        check_tracking(config)
    config.tracking = TrackingConfig()
    check_tracking(config)


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as it is told."""

    code, body, login = 200, "{}", ""

    def do_GET(self) -> None:
        right = not self.login or self.headers.get("Authorization") == self.login
        self.send_response(type(self).code if right else 401)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """Its address."""
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as there:
        thread = threading.Thread(target=there.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{there.server_port}"
        there.shutdown()
        thread.join()


THERE = json.dumps({"experiment": {"experiment_id": "1", "lifecycle_stage": "active"}})
GONE = json.dumps({"experiment": {"experiment_id": "1", "lifecycle_stage": "deleted"}})
NO_ID = json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": "Experiment ID must be a valid integer."})
NONE = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})


def test_a_server_is_tried_once_and_what_it_answers_decides(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(variable, raising=False)

    def answer(code: int, body: str, login: str = "", user: str = "", number: str = "") -> str:
        monkeypatch.setattr(Answers, "code", code)
        monkeypatch.setattr(Answers, "body", body)
        monkeypatch.setattr(Answers, "login", login)
        return try_store(mlflow(f"http://{user}{server}"), Experiment("digits", "MLFLOW_EXPERIMENT_ID", number))

    assert answer(200, THERE) == "" and answer(404, NONE) == ""
    basic = "Basic " + base64.b64encode(b"me:word").decode()
    assert answer(200, THERE, basic, "me:word@") == ""
    assert "503" in answer(503, "try later") and "429" in answer(429, "too many")
    for code, body, says in (
        (404, "<html>", "no MLflow server"),
        (405, "", "no MLflow server"),
        (403, "", "does not let"),
        (200, "<html>", "not as an MLflow server"),
        (200, "[]", "not as an MLflow server"),
        (200, GONE, "was deleted"),
    ):
        with pytest.raises(UserError, match=says):
            answer(code, body)
    with pytest.raises(UserError, match="MLFLOW_EXPERIMENT_ID=abc: there is no such experiment"):
        answer(400, NO_ID, number="abc")
    with pytest.raises(UserError, match="does not let") as caught:
        answer(200, THERE, basic, "me:wrong@")
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "word")
    assert answer(200, THERE, basic) == ""
    monkeypatch.setenv("MLFLOW_TRACKING_AWS_SIGV4", "true")  # a login that MLflow alone can make
    assert "401" in answer(200, THERE, "Basic other")


def test_a_server_that_is_down_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "refused" in try_store(mlflow(f"http://127.0.0.1:{port}"), Experiment("digits"))
    assert "refused" in try_store(mlflow(f"postgresql://me:word@127.0.0.1:{port}/x"), Experiment("digits"))
    monkeypatch.setattr(tracking_store, "TRY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in try_store(mlflow(f"http://127.0.0.1:{silent.getsockname()[1]}"), Experiment("digits"))
    assert try_store(mlflow("sqlite:///x.db"), Experiment("digits")) == ""


@pytest.mark.parametrize("typed", ["launch.workers=2", "launch=forkserver", "strategy=pserver_async"])
def test_temporary_folders_that_take_no_sockets_are_refused_where_processes_need_them(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    (deep := folder.parent / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(private, "_keeps", lambda place: place == str(deep))
    code, _, error = run("+recipe=digits_lenet", typed)
    assert code == 2 and f"TMPDIR={deep}: its path has {len(str(deep))} bytes" in error
    assert list(folder.iterdir()) == []
    assert run("+recipe=digits_lenet", "plan=true")[0] == 0, "one worker needs none"
