"""A copy of the process writes what was there when it began; whatever ends it is told; it outlives nobody."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.notes import Notes
from tests.pace import wait_for
from tests.strategies.pserver.played import Played
from tests.strategies.pserver.states import whole
from tests.strategies.pserver.test_rates import OPTIMIZERS, Servers, net
from tests.strategies.pserver.test_rates import run as run_with
from trainer.checkpoint import durable_folder
from trainer.checkpoint import writer as parts_writer
from trainer.host.patience import LONGEST_POLL_S
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import CREATES, WANTS_DENSE, Verb, text
from trainer.strategies.pserver.protocol.shared_memory import Pool
from trainer.strategies.pserver.server.part_writer import STILL_S, Forked, processor_time
from trainer.strategies.pserver.server.rules import BACKUPS
from trainer.weights.server_files import ServerFile


class Gate:
    """The copy waits there for the test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)

    def wait(self) -> None:
        self.path.read_bytes()

    def open(self) -> None:
        self.path.write_bytes(b"")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def now() -> list[float]:
    """The writer's clock."""
    return [0.0]


@pytest.fixture
def writer(now: list[float]) -> Iterator[Forked]:
    made = Forked(lambda: now[0])
    yield made
    if made._copy is not None:
        os.kill(made._copy, signal.SIGKILL)
        os.waitpid(made._copy, 0)


def noted(said: list[str]) -> Callable[[str], bool]:
    """Told of in this list."""

    def failed(why: str) -> bool:
        said.append(why)
        return True

    return failed


def copy_of(writer: Forked) -> psutil.Process:
    """The copy that writes now."""
    assert writer._copy is not None
    return psutil.Process(writer._copy)


def ended(writer: Forked) -> Callable[[], bool]:
    return lambda: not writer.busy()


def test_a_copy_has_what_was_there_when_it_began(tmp_path: Path, gate: Gate, writer: Forked) -> None:
    values, said = np.zeros(1 << 20), list[str]()

    def write() -> None:
        gate.wait()
        (tmp_path / "part").write_bytes(values.tobytes())

    writer.begin(write, noted(said))
    values += 1.0
    assert writer.busy() and not (tmp_path / "part").exists()
    gate.open()
    wait_for(ended(writer), 20, "it ends")
    assert np.frombuffer((tmp_path / "part").read_bytes()).max() == 0.0 and not said


def test_a_copy_that_is_killed_is_told_of(gate: Gate, writer: Forked) -> None:
    said = list[str]()
    writer.begin(gate.wait, noted(said))
    assert writer.busy()
    copy = copy_of(writer)
    copy.kill()
    wait_for(ended(writer), 20, "it is noticed")
    assert said == ["the process that wrote it was killed by SIGKILL (out of memory?)"]
    assert not writer.busy() and len(said) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError("too much")])
def test_a_copy_that_cannot_write_says_why(error: Exception, tmp_path: Path, writer: Forked) -> None:
    def write() -> None:
        raise error

    def failed(why: str) -> bool:
        return bool((tmp_path / "why").write_text(f"{os.getpid()} {why}"))

    writer.begin(write, failed)
    wait_for(ended(writer), 20, "it ends")
    copy, _, why = (tmp_path / "why").read_text().partition(" ")
    assert int(copy) != os.getpid() and str(error.args[-1]) in why


@pytest.mark.parametrize("raises", [True, False])
def test_a_copy_that_cannot_even_say_why_is_told_of(raises: bool, writer: Forked) -> None:
    """As where the note and the log are on a disk that is full, or read-only for a while."""
    server, said = os.getpid(), list[str]()

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def failed(why: str) -> bool:
        if os.getpid() != server and raises:
            raise OSError(errno.ENOSPC, "No space left on device")
        said.append(why)
        return os.getpid() == server

    writer.begin(write, failed)
    wait_for(ended(writer), 20, "it ends")
    assert said == ["the process that wrote it could not tell why here; the server's log may"]


def test_a_signal_without_a_name_is_told_of_by_its_number(gate: Gate, writer: Forked) -> None:
    said = list[str]()
    writer.begin(gate.wait, noted(said))
    copy = copy_of(writer)
    copy.send_signal(40)
    wait_for(ended(writer), 20, "it is noticed")
    assert said == ["the process that wrote it was killed by signal 40"]


def test_a_copy_that_stands_still_is_killed_and_another_one_begins(
    tmp_path: Path, gate: Gate, now: list[float], writer: Forked
) -> None:
    """It was stopped, or its disk does not answer. Time in which the server was stopped itself does not count."""
    said = list[str]()
    writer.begin(gate.wait, noted(said))
    copy = copy_of(writer)
    wait_for(lambda: copy.status() == psutil.STATUS_SLEEPING, 20, "it waits")
    copy.suspend()
    wait_for(lambda: copy.status() == psutil.STATUS_STOPPED, 20, "it is stopped")
    assert writer.busy()
    now[0] += 100 * STILL_S
    assert writer.busy() and not said
    for _ in range(round(STILL_S / LONGEST_POLL_S)):
        assert writer.busy() or said
        now[0] += LONGEST_POLL_S
    assert not writer.busy()
    assert said == ["the process that wrote it has done nothing for 600 s, and was killed"]
    wait_for(lambda: copy.status() == psutil.STATUS_ZOMBIE, 20, "it ends")
    writer.begin(lambda: (tmp_path / "part").touch(), noted(said))
    wait_for(ended(writer), 20, "the next one ends")
    assert (tmp_path / "part").exists() and len(said) == 1 and not copy.is_running()


def test_a_copy_that_works_is_waited_for(now: list[float], writer: Forked) -> None:
    said = list[str]()
    writer.begin(lambda: [None for _ in iter(int, 1)], noted(said))  # type: ignore[func-returns-value, misc]
    copy = copy_of(writer)
    for _ in range(10):
        before = processor_time(copy.pid)
        wait_for(lambda before=before: processor_time(copy.pid) != before, 20, "it works")
        now[0] += STILL_S
        assert writer.busy()
    copy.kill()
    wait_for(ended(writer), 20, "it is noticed")


def test_where_memory_runs_out_the_copy_is_ended_and_not_the_server(gate: Gate, writer: Forked) -> None:
    def adjusted(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    writer.begin(gate.wait, noted([]))
    copy = copy_of(writer)
    wait_for(lambda: adjusted(copy.pid) == 1000, 20, "the kernel knows")
    assert adjusted(os.getpid()) < 1000
    gate.open()


def test_without_memory_for_a_copy_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, writer: Forked) -> None:
    def fork() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    said = list[str]()
    monkeypatch.setattr(os, "fork", fork)
    writer.begin(lambda: None, noted(said))
    assert said == ["the server cannot be copied (Cannot allocate memory); checkpoint.background=false needs no copy"]
    assert not writer.busy()


def test_a_copy_holds_no_connection_of_its_server(tmp_path: Path, writer: Forked) -> None:
    """A peer sees the end of its connection when the server has closed it, whatever a copy still writes."""

    def write() -> None:
        (tmp_path / "open").write_text(" ".join(os.listdir("/proc/self/fd")))

    one, other = socket.socketpair()
    with one, other:
        writer.begin(write, noted([]))
        wait_for(ended(writer), 20, "it ends")
        found = {int(number) for number in (tmp_path / "open").read_text().split()}
    assert found & {one.fileno(), other.fileno()} == set() and len(found - {0, 1, 2}) <= 2, "the folder and the file"


def test_a_process_whose_other_threads_work_can_be_copied(tmp_path: Path, writer: Forked) -> None:
    """They hold locks (of memory, of the interpreter, of output) at any moment, and are not in the copy."""
    over, said = threading.Event(), list[str]()

    def works() -> None:
        while not over.is_set():
            print(end="", file=sys.__stdout__, flush=True)
            np.sort(np.random.default_rng(0).random(1000))

    threads = [threading.Thread(target=works) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            path = tmp_path / str(number)

            def write(path: Path = path) -> None:
                print(end="", file=sys.__stdout__, flush=True)
                path.write_bytes(np.arange(9999).tobytes())

            writer.begin(write, noted(said))
            wait_for(ended(writer), 20, "it ends")
            assert path.stat().st_size == 8 * 9999 and not said
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Lent(Played):
    """A server whose answers lie in memory that is shared with workers, as they do on one host."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.pool = Pool()
        super().__init__(*arguments, **options)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        found = self.pool.room(count, torch.empty(0, dtype=dtype).numpy().dtype)
        assert found is not None
        return torch.from_numpy(found)


def test_what_lies_in_shared_memory_is_copied_before_the_server_goes_on(
    tmp_path: Path, gate: Gate, writer: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork keeps no shared memory as it was, and the server uses it again: for delay compensation it remembers what
    workers have."""
    write_part = snapshot.write_part

    def slowly(*arguments: Any) -> None:
        gate.wait()
        write_part(*arguments)

    monkeypatch.setattr(snapshot, "write_part", slowly)
    served = Lent(tmp_path, Notes(), writer=writer, delay_compensation=0.5)
    served.starts()
    served.asks(0, Verb.PULL, flags=WANTS_DENSE | CREATES)
    [kept] = [segment for segment in served.pool.segments if not segment.free]
    used = kept.used
    where = {"folder": "checkpoints/step-1", "checkpoint": True, "behind": True}
    assert served.asks(0, Verb.SAVE, text(where)).verb == Verb.DONE
    assert writer.busy()
    for sequence in range(1, 2 * BACKUPS):
        served.pushes(1, 1, 0, 6)
        served.server.parameters.opened()[0].version = sequence
        served.asks(0, Verb.PULL, flags=WANTS_DENSE | CREATES)
        served.answers.clear()  # workers have taken them
    assert kept.used > used, "what the copy was left is something else now"
    gate.open()
    wait_for(ended(writer), 20, "it ends")
    part = ServerFile(0, durable_folder.partial_of(tmp_path / "checkpoints" / "step-1") / "server-0.safetensors")
    assert part["rule|0|0|0|0"].tolist() == [0] * 6 and part.version == 0


def test_a_part_that_is_written_once_more_is_not_there_until_then(
    tmp_path: Path, gate: Gate, writer: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was lost while the servers saved, and the first one has them save anew: who completes the checkpoint
    takes no part of the first time, which may be replaced while the checkpoint gets its name."""
    served, folder = Played(tmp_path, Notes(), writer=writer), tmp_path / "checkpoints" / "step-1"
    served.starts()
    asked = text({"folder": "checkpoints/step-1", "checkpoint": True, "behind": True})
    served.asks(0, Verb.SAVE, asked)
    wait_for(ended(writer), 20, "it is written")
    assert durable_folder.is_written(folder, "server-0.safetensors")
    write_part = snapshot.write_part
    monkeypatch.setattr(snapshot, "write_part", lambda *arguments: (gate.wait(), write_part(*arguments)))
    served.asks(0, Verb.SAVE, asked)
    assert not durable_folder.is_written(folder, "server-0.safetensors")
    gate.open()
    wait_for(ended(writer), 20, "it is written again")
    assert durable_folder.is_written(folder, "server-0.safetensors")


def test_what_cannot_be_told_now_is_told_as_soon_as_it_can(
    tmp_path: Path, writer: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system was read-only for a while: neither the part nor the note could be written."""
    served, folder = Played(tmp_path, Notes(), writer=writer), tmp_path / "checkpoints" / "step-1"
    served.starts()
    note = parts_writer.failure_of(folder, "server-0.safetensors")

    def refuses(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(snapshot, "write_part", refuses)
        read_only.setattr(Path, "write_text", refuses)
        read_only.setattr(Path, "touch", refuses)
        durable_folder.partial_of(folder).mkdir(parents=True)
        served.asks(0, Verb.SAVE, text({"folder": "checkpoints/step-1", "checkpoint": True, "behind": True}))
        wait_for(ended(writer), 20, "it ends")
        served.server.saving.has_written()
        assert not note.exists()
    served.server.saving.has_written()
    assert note.read_text().startswith(
        "server-0.safetensors cannot be written: the process that wrote it could not tell why"
    )
    note.unlink()
    served.server.saving.has_written()
    assert not note.exists(), "it is told once"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_optimizers_remember_is_no_worker_s_memory(optimizer: str) -> None:
    """A gradient lies where its worker writes the next one."""
    made = run_with(optimizer, {})
    servers = Servers(made, net(), 1, None)
    [shard] = servers.shards
    gradients = [torch.full((shard.layout.dense,), float(n)).double() for n in (1, 2)]
    for gradient in gradients:
        shard.apply(gradient, {}, 1)
    before = whole(shard.state()[0])
    for gradient in gradients:
        gradient.fill_(1e9)
    after = whole(shard.state()[0])
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


PARENT = """
import os, sys, time
from pathlib import Path
from trainer.strategies.pserver.server.part_writer import Forked
writer = Forked()
writer.begin(lambda: (Path(sys.argv[1]).write_text(str(os.getpid())), time.sleep(600)), print)
time.sleep(600)
"""


@pytest.mark.all
def test_a_copy_dies_with_its_server(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid")])
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60, "the copy is there")
        copy = psutil.Process(int((tmp_path / "pid").read_text()))
        assert copy.ppid() == parent.pid
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not copy.is_running() or copy.status() == psutil.STATUS_ZOMBIE, 20, "it is gone")
