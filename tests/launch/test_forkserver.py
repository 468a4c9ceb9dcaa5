"""The local launcher: whoever fails first is named with its own error and log, and nobody is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.entries import Babble
from tests.pace import patient, wait_for
from tests.ports import ports
from tests.runs import alive, start, trainer
from tests.zygote import Started
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host.notes_board import FolderLost, NoNote
from trainer.launch import supervisor
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.process import Failure
from trainer.launch.started_process import Role
from trainer.launch.supervisor import HostResults
from trainer.strategies.pserver.worker.requests import Fenced

pytestmark = pytest.mark.usefixtures("warm")
FAILS_WITHIN_S, ENDS_WITHIN_S = 30, 10


def entry(name: str) -> str:
    return f"tests.launch.entries:{name}"


def workers(name: str, size: int = 2) -> Role:
    return Role("worker", size, entry(name), ["cpu"] * size)


def failure(name: str, logs: Path, payload: Any = None, roles: list[Role] | None = None) -> str:
    """The message with which a launch fails in time, leaving no process behind."""
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        launch(roles or [workers(name, 3)], payload, logs, Rendezvous())
    assert time.monotonic() - start < patient(FAILS_WITHIN_S)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not alive(list(left))
    return str(caught.value)


@pytest.mark.all
def test_entries_get_their_seat_and_return_to_the_parent(tmp_path: Path) -> None:
    roles = [Role("server", 1, entry("tells"), ["cpu"]), workers("tells")]
    results = launch(roles, "quietly", tmp_path, Rendezvous())
    assert results.of.keys() == {"server", "worker"}
    assert [results.of["worker"][rank]["seat"] for rank in range(2)] == [
        ("worker", 0, 2, 0, "cpu"),
        ("worker", 1, 2, 1, "cpu"),
    ]
    assert results.of["worker"][1]["env"] == ["1", "2", "1", "2", "127.0.0.1"]
    assert results.of["server"][0]["env"] == ["0", "1", "0", "1", "127.0.0.1"]


def test_a_log_is_clean_while_it_is_written(tmp_path: Path) -> None:
    """So that a launcher that is killed leaves no secret in it, whoever tracks the run."""
    secret = 's3cret\'of "a" hub'
    told = Babble((secret, "ghp_0123abc"), str(tmp_path / "workerlog.0"))
    results = launch([workers("babbles", 1)], told, tmp_path, Rendezvous())
    log = results.of["worker"][0]
    assert log.splitlines() == [
        "(hidden) and (hidden) here",
        "\\x1b[2J\\u202e",
        "ValueError: (hidden)",
        "no newline (hidden)",
    ]


def test_two_hosts_are_one_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [port] = ports(1)

    def host(number: int) -> HostResults:
        role = Role("worker", 4, entry("sums"), ["cpu", "cpu"], first_rank=2 * number)
        return launch([role], None, tmp_path / f"host{number}", Rendezvous(port=port, number=number, hosts=2))

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(host, range(2))
    assert first.of == {"worker": {0: (6.0, "0", "0"), 1: (6.0, "1", "1")}}
    assert second.of == {"worker": {2: (6.0, "2", "0"), 3: (6.0, "3", "1")}}
    assert {p.name for p in (tmp_path / "host1").iterdir()} == {"workerlog.2", "workerlog.3", ".lock"}
    assert capfd.readouterr().out.splitlines() == ["rank 0 has summed"]


@pytest.mark.all
def test_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as bound:  # and not listening, so that the port is nobody else's either
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(RunFailed, match=rf"host 0 did not answer at 127\.0\.0\.1:{port} within 2 s"):
            launch([workers("sums")], None, tmp_path, Rendezvous(port=port, number=1, hosts=2, timeout_s=2))
    assert time.monotonic() - start < 2 + patient(18)


def test_launchers_of_two_hosts_name_the_worker_that_holds_up_the_other(tmp_path: Path) -> None:
    """The other waits for it long before it hangs, and its launcher sees that first."""
    [port] = ports(1)

    def host(number: int) -> str:
        role = Role("worker", 2, entry("holds_up"), ["cpu"], first_rank=number)
        meeting = Rendezvous(port=port, number=number, hosts=2)
        with pytest.raises(RunFailed) as ended:
            launch([role], None, tmp_path / f"host{number}", meeting, hang_s=0.5)
        return str(ended.value)

    with ThreadPoolExecutor(2) as both:
        told = list(both.map(host, range(2)))
    named = "worker 1 (host 1) hangs, after 3 updates; no worker has done anything for"
    assert all(named in one for one in told), told
    assert any("worker 1: File" in one and "in holds_up" in one for one in told), "its stack is shown"


def test_each_log_holds_both_streams_of_its_process_alone_and_the_first_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch([Role("server", 1, entry("tells"), ["cpu"]), workers("tells")], "loudly", tmp_path, Rendezvous())
    screen = capfd.readouterr()
    for name in ("workerlog.0", "workerlog.1", "serverlog.0"):
        who = f"{name.removesuffix(name[-5:])} {name[-1]}"
        lines = (tmp_path / name).read_text().splitlines()
        said = [line for line in lines if line.startswith("loudly")]
        assert sorted(said) == sorted(
            [f"loudly stdout of {who}", f"loudly stderr of {who}", f"loudly a child of {who}", "loudly its stderr"]
        )
    shown = [line for line in screen.out.splitlines() if line.startswith("loudly")]
    assert sorted(shown) == sorted(
        line for line in (tmp_path / "workerlog.0").read_text().splitlines() if line.startswith("loudly")
    )
    assert "loudly" not in screen.err


IN_WORDS = ("the disk is full\n  and a second line", "data.root=x: is empty. Type instead: data.root=y")
ENDS: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("raises", None, "worker 1:\n", ("ValueError: batch 3 is broken", 'entries.py", line', "in _read_batch")),
    ("raises_and_stays", None, "worker 1:\n", ("ValueError: batch 4 is broken",)),
    ("fails_in_words", "RunFailed", f"worker 1: {IN_WORDS[0]}\n  its log: ", ()),
    ("fails_in_words", "UserError", f"worker 1: {IN_WORDS[1]}\n  its log: ", ()),
    ("killed", int(signal.SIGKILL), "worker 1 was killed by SIGKILL", ("worker 1 trains", "out of memory?")),
    ("killed", int(signal.SIGABRT), "worker 1 was killed by SIGABRT", ("(most recent call first)",)),
    ("crashes", None, "worker 1 was killed by SIGSEGV", ()),
    ("aborts", None, "worker 1 was killed by SIGABRT", ("gloo::IoException", "Connection reset by peer", "in inside")),
    ("exits", 7, "worker 1 ended with exit code 7", ("the last words",)),
    ("exits", 0, "worker 1 ended with exit code 0, before it had done its work", ()),
    ("leaves_early", 0, "worker 1", ("SystemExit: 0",)),  # it was taken for the end of its work
    ("leaves_early", 3, "worker 1", ("SystemExit: 3",)),
]


@pytest.mark.parametrize(
    ("how", "payload", "begins", "says"), ENDS, ids=[f"{how} {payload}" for how, payload, *_ in ENDS]
)
def test_rank_that_fails_ends_the_job_and_is_named_with_its_own_error_and_log(
    how: str, payload: Any, begins: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    message = failure(how, tmp_path, payload)
    assert message.startswith(begins) and all(part in message for part in says), message
    assert message.endswith(f"its log: {tmp_path / 'workerlog.1'}") and len(message.splitlines()) < 25
    assert "worker 0" not in message and "worker 2" not in message, "who has lost it"
    assert how != "raises" or "worker 1 was here" in (tmp_path / "workerlog.1").read_text()


@pytest.mark.parametrize("apart", [True, False])
def test_rank_that_has_done_its_work_and_does_not_end_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], apart: bool
) -> None:
    monkeypatch.setattr(supervisor, "STAY_S", 2)
    seen, dismiss = tmp_path / "seen", supervisor.Supervisor._dismiss

    def sees(self: supervisor.Supervisor) -> None:
        if all(member.handle.returned for member in self.running):
            seen.touch()
        dismiss(self)

    monkeypatch.setattr(supervisor.Supervisor, "_dismiss", sees)
    role = Role("worker", 2, entry("returns_and_stays"), ["cpu"] * 2, apart=apart)
    assert launch([role], str(seen), tmp_path, Rendezvous(), hang_s=0.5).of == {"worker": {0: 0, 1: 1}}
    assert "worker 1 has done its work, and does not end within 2 s: it is killed" in capfd.readouterr().out


def test_cause_is_named_and_not_its_echo_in_the_same_second(tmp_path: Path) -> None:
    message = failure("echoes", tmp_path, roles=[workers("echoes")])
    assert message.startswith("worker 1:") and "the cause" in message
    assert "an echo" not in message


def test_what_a_rank_says_of_its_failure_is_both_ends_of_a_long_text() -> None:
    failure = Failure.of(ValueError("first words " + "x" * 1_000_000 + " last words"))
    assert "first words" in failure.words and failure.words.endswith(" last words") and len(failure.words) < 40_000
    assert not failure.for_users


@pytest.mark.parametrize(("kind", "told"), [(RunFailed, True), (UserError, True), (ValueError, False)])
def test_error_made_for_users_counts_although_another_followed_from_it(kind: type[Exception], told: bool) -> None:
    try:
        try:
            raise kind("its words", "")
        finally:
            raise OSError("while closing")
    except OSError as error:
        failure = Failure.of(error)
    assert failure.for_users == told and "its words" in failure.words
    assert ("while closing" in failure.words) != told


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoNote("host 0: it was closed"), "the run's other processes cannot be reached: host 0: it was closed"),
        (FolderLost("the folder run/.run is gone"), "the folder run/.run is gone"),
    ],
)
def test_a_lost_board_is_told_in_a_sentence(error: NoNote, words: str) -> None:
    failure = Failure.of(error)
    assert failure.for_users and failure.words == words


def test_launch_works_where_the_temporary_folder_is_too_long_for_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    done = trainer(str(tmp_path), "exits", cwd=tmp_path, module="tests.launch.failing", spares=0, TMPDIR=str(deep))
    assert "worker 1 ended with exit code 7" in done.stdout, done.stderr
    assert list(deep.iterdir()) == []


def test_server_that_fails_ends_the_workers(tmp_path: Path) -> None:
    roles = [Role("server", 1, entry("server_fails"), ["cpu"]), workers("server_fails")]
    message = failure("server_fails", tmp_path, roles=roles)
    assert message.startswith("server 0:\n") and "no memory for the table" in message
    assert message.endswith(f"its log: {tmp_path / 'serverlog.0'}")


def test_everything_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    found = launch([workers("listens")], os.getpid(), tmp_path, Rendezvous()).of["worker"]
    addresses = [address for answers in found.values() for address in answers]
    assert {who for who, _, _ in addresses} == {"worker"}, "Gloo must have been seen, and the launcher has no port"
    assert {ip for _, ip, _ in addresses} <= {"127.0.0.1", "::1"}, addresses
    assert not [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_callers_signal_handlers_are_kept(tmp_path: Path) -> None:
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def mine(number: int, frame: Any) -> None:
        raise AssertionError

    before = {name: signal.signal(name, mine) for name in names}
    try:
        launch([workers("tells")], "signals", tmp_path, Rendezvous())
        assert [signal.getsignal(name) for name in names] == [mine] * 3
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def at_work(folder: Path, **how: bool) -> dict[str, Any]:
    return {"folder": str(folder), "deaf": False, "fails": False, **how}


def started(folder: Path) -> list[psutil.Process]:
    """The workers of ``works_for_long`` and their readers, and the forkserver if it is the launcher's own."""
    pids = {int(pid) for path in folder.glob("pids.*") for pid in path.read_text().split()}
    own = {process.pid for process in psutil.Process().children()}
    return [psutil.Process(pid) for pid in pids - own if psutil.pid_exists(pid)]


def test_interrupt_in_the_same_process_ends_all_and_says_so(tmp_path: Path) -> None:
    everybody: list[psutil.Process] = []

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.glob("pids.*"))) == 2, 60, "the workers work")
        everybody.extend(started(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="got SIGINT"):
        launch([workers("works_for_long")], at_work(tmp_path), tmp_path / "logs", Rendezvous())
    thread.join()
    assert len(everybody) == 4
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")


@pytest.mark.all
def test_readers_end_with_the_workers_of_a_failed_job(tmp_path: Path) -> None:
    everybody: list[psutil.Process] = []

    def poll() -> None:
        wait_for(lambda: len(list(tmp_path.glob("pids.*"))) == 2, 60, "the workers work")
        everybody.extend(started(tmp_path))
        (tmp_path / "seen").touch()

    watch = threading.Thread(target=poll)
    watch.start()
    with pytest.raises(RunFailed, match="worker 1:"):
        launch([workers("works_for_long")], at_work(tmp_path, fails=True), tmp_path / "logs", Rendezvous())
    watch.join()
    assert len(everybody) == 4
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")


@pytest.fixture
def parent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Started, list[psutil.Process]]]:
    """A launcher in a process of its own with two workers at work, and all it has started; deaf: they ignore
    SIGTERM."""
    told = getattr(request, "param", [])
    process = start(str(tmp_path), *told, cwd=tmp_path, module="tests.launch.parent", spares=0)
    everybody: set[psutil.Process] = set()
    try:
        wait_for(lambda: len(list(tmp_path.glob("pids.*"))) == 2, 100, "the workers work")
        everybody = {*psutil.Process(process.pid).children(recursive=True), *started(tmp_path)}
        assert len(everybody) >= 5  # the forkserver, two workers, two readers
        yield process, list(everybody)
    finally:
        process.kill()
        for left in alive(list(everybody)):
            left.kill()
        process.wait()


def test_killed_launcher_leaves_no_process_behind(parent: tuple[Started, list[psutil.Process]]) -> None:
    process, everybody = parent
    process.kill()
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S, f"{everybody} end")


@pytest.mark.parametrize(
    ("parent", "number"),
    [pytest.param([], signal.SIGINT, marks=pytest.mark.long), (["deaf"], signal.SIGTERM)],
    indirect=["parent"],
    ids=["SIGINT", "SIGTERM"],
)
def test_signal_to_the_launcher_ends_every_process(
    parent: tuple[Started, list[psutil.Process]], number: signal.Signals, tmp_path: Path
) -> None:
    process, everybody = parent
    sent = time.monotonic()
    process.send_signal(number)
    process.wait(patient(ENDS_WITHIN_S))
    wait_for(lambda: not alive(everybody), ENDS_WITHIN_S - (time.monotonic() - sent), f"{everybody} end")
    assert process.returncode == 130
    assert re.match("interrupted: ", (tmp_path / "screen.txt").read_text())


def test_a_worker_that_was_declared_lost_does_not_end_the_run() -> None:
    """One that was stopped and wakes is told so by a server; the others go on without it."""
    assert not Failure.of(Fenced("worker 1 was declared lost")).ends_run
    assert Failure.of(RunFailed("the loss is not a number")).ends_run
    assert Failure.of(UserError("key", "no")).ends_run
    assert not Failure.of(ValueError("no")).ends_run
