"""Starts the plan's processes on this host from a forkserver, watches them, and ends them all when one fails.

The processes come from torch's elastic machinery (``torch.distributed.elastic.multiprocessing``), one group per role:
roles may outlive each other, so they cannot be one group.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    SignalException,
    start_processes,
)

from trainer.errors import Interrupted, RunFailed, first_line
from trainer.launch.hosts import Meeting, meet
from trainer.lifeline import end_with
from trainer.strategies.base import Seat

POLL_S = 0.1
END_S = 3
LINGER_S = 5
LONGEST_FOLDER = 80
"""The path of a Unix socket has 108 bytes at most."""
LOG_NAMES = {"worker": "workerlog", "server": "serverlog"}


@dataclass(frozen=True)
class Role:
    """Processes of one role on this host.

    Attributes:
        name: ``worker`` or ``server``.
        size: processes of the role over all hosts; ``first_rank`` and ``here``: this host's.
        entry: ``module:function`` called as ``entry(seat, payload)`` in each process.
        devices: one per process here.
        apart: one of its processes may die and the others go on; each is then a group of its own.
        first_local: the number on this host of its first process.
    """

    name: str
    size: int
    entry: str
    devices: Sequence[str]
    first_rank: int = 0
    apart: bool = False
    first_local: int = 0
    local_size: int = 0

    @property
    def key(self) -> str:
        """Of its group of processes."""
        return f"{self.name}.{self.first_rank}"

    def split(self) -> list[Role]:
        """Groups to start: itself, or one for each process."""
        if not self.apart:
            return [replace(self, local_size=self.here)]
        return [
            replace(self, devices=[d], first_rank=self.first_rank + i, first_local=i, local_size=self.here)
            for i, d in enumerate(self.devices)
        ]

    @property
    def here(self) -> int:
        """Processes on this host."""
        return len(self.devices)


def launch(
    roles: Sequence[Role], payload: Any, log_dir: Path, meeting: Meeting, preload: Sequence[str] = ()
) -> dict[str, dict[int, Any]]:
    """Run all processes to their end.

    Args:
        roles: what to start here.
        payload: picklable, handed to every entry.
        log_dir: where ``workerlog.N`` and ``serverlog.N`` go; rank 0's output is also shown on the screen.
        meeting: where the processes meet.
        preload: modules that the forkserver imports once for all processes.

    Returns:
        For each role and rank here, what its entry returned.

    Raises:
        RunFailed: a process died that the others cannot do without; the message names it, its own error and its log.
            All others are ended.
        Interrupted: SIGINT or SIGTERM came; all processes are ended.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell on screen what RunFailed says in one place
    multiprocessing.set_forkserver_preload(["trainer.launch.local", *preload])
    scratch = Path(tempfile.mkdtemp(prefix="trainer-"))
    groups: dict[str, MultiprocessContext] = {}
    roles = [part for role in roles for part in role.split()]
    try:
        with _handlers_kept():
            store = [open_store(meeting)]  # in a list, because the frames of an error would keep it open
            try:
                meet(store[0], meeting)
                secret = _secret(store[0], meeting)
                for role in roles:
                    groups[role.key] = _start(role, payload, log_dir, scratch, meeting, store[0].port, secret)
                return _watch(roles, groups, log_dir, scratch, store)
            except (SignalException, KeyboardInterrupt) as error:
                raise Interrupted(f"interrupted: {error}") from None
            finally:
                _end(groups)
                store.clear()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def open_store(meeting: Meeting) -> dist.TCPStore:
    """Host 0's store (bound to its address alone), or a connection to it.

    Raises:
        RunFailed: host 0 does not answer.
    """
    timeout = _seconds(meeting.timeout_s)
    if not meeting.serves:
        try:
            return dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        except dist.DistError as error:
            where = f"{meeting.host}:{meeting.port} within {meeting.timeout_s:g} s (launch.timeout_s)"
            hint = " (that is this host itself: give launch.master_addr)" if meeting.host.startswith("127.") else ""
            raise RunFailed(f"host 0 did not answer at {where}{hint}: {first_line(error)}") from error
    listening = socket.create_server((meeting.host, meeting.port), backlog=512)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        meeting.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def _secret(store: dist.TCPStore, meeting: Meeting) -> bytes:
    """The run's secret, made by host 0. On one host it never leaves this process but to its children."""
    if meeting.hosts == 1:
        return secrets.token_bytes(32)
    if meeting.serves:
        store.set("secret", secrets.token_hex(32))
    return bytes.fromhex(store.get("secret").decode())


def _start(
    role: Role, payload: Any, log_dir: Path, scratch: Path, meeting: Meeting, port: int, secret: bytes
) -> MultiprocessContext:
    base = {
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(role.size),
        "LOCAL_WORLD_SIZE": str(role.local_size),
        **({"GLOO_SOCKET_IFNAME": meeting.interface} if meeting.interface else {}),
        **meeting.env,
    }
    folder = str(scratch) if meeting.hosts == 1 and len(str(scratch)) <= LONGEST_FOLDER else ""
    context = start_processes(
        name=role.name,
        entrypoint=_enter,
        args={i: (role, i, payload, (meeting.host, port), os.getpid(), secret, folder) for i in range(role.here)},
        envs={
            i: {**base, "RANK": str(role.first_rank + i), "LOCAL_RANK": str(role.first_local + i)}
            for i in range(role.here)
        },
        logs_specs=_Logs(role, log_dir, scratch),
        log_line_prefixes={i: "" for i in range(role.here)},
        start_method="forkserver",
    )
    assert isinstance(context, MultiprocessContext)
    return context


def _enter(
    role: Role, index: int, payload: Any, address: tuple[str, int], launcher: int, secret: bytes, folder: str
) -> Any:
    """In a started process: end with the launcher, connect to the store, call the role's entry."""
    end_with(launcher)
    # A child of a forkserver would start reading processes from a forkserver of its own, and these, being no children
    # of this process, would not notice its death.
    multiprocessing.set_start_method("fork", force=True)
    os.dup2(1, 2)  # torch's redirection opens a file per stream; both belong into one log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = dist.TCPStore(*address, is_master=False, timeout=_seconds(300))
    seat = Seat(
        role.name, role.first_rank + index, role.size, role.first_local + index, role.local_size, role.devices[index],
        store, secret=secret, host=address[0], folder=folder,
    )  # fmt: skip
    return resolve(role.entry)(seat, payload)


def resolve(entry: str) -> Callable[..., Any]:
    """The object behind ``module:name``."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _watch(
    roles: Sequence[Role],
    groups: dict[str, MultiprocessContext],
    log_dir: Path,
    scratch: Path,
    store: list[dist.TCPStore],
) -> dict[str, dict[int, Any]]:
    results: dict[str, dict[int, Any]] = {role.name: {} for role in roles}
    running = {role.key: role for role in roles}
    lost: dict[int, str] = {}
    alone = 0.0
    while running:
        for role in list(running.values()):
            outcome = groups[role.key].wait(0)
            if outcome is None:
                continue
            if outcome.is_failed():
                time.sleep(POLL_S)
                if not _can_do_without(role, running, results, scratch):
                    raise RunFailed(next(iter(lost.values()), "") or _first_failure(roles, groups, log_dir, scratch))
                lost[role.first_rank] = _first_failure([role], groups, log_dir, scratch)
                store[0].set(f"lost/{role.name}/{role.first_rank}", "its process ended")
                print(f"\nATTENTION: {lost[role.first_rank]}\n  the others go on without it\n", flush=True)
                _error_file(scratch, role, 0).unlink(missing_ok=True)
            else:
                results[role.name] |= {role.first_rank + i: v for i, v in outcome.return_values.items()}
            del running[role.key]
        if _lingers(scratch):
            raise RunFailed(_first_failure(roles, groups, log_dir, scratch))
        if running and (why := _nobody_waits_for(running.values(), store[0])):
            alone = alone or time.monotonic()
            if time.monotonic() - alone > LINGER_S:
                for key, role in list(running.items()):
                    lost[role.first_rank] = f"{role.name} {role.first_rank} was lost ({why[key]}) and is ended"
                    print(f"\nATTENTION: {lost[role.first_rank]}\n", flush=True)
                return {**results, "lost": lost}
        time.sleep(POLL_S)
    return {**results, **({"lost": lost} if lost else {})}


def _nobody_waits_for(running: Iterable[Role], store: dist.TCPStore) -> dict[str, str]:
    """Why each of these was declared lost by the others, if all were: stopped processes end by no word of anybody."""
    why = {}
    for role in running:
        key = f"fenced/{role.name}/{role.first_rank}"
        if not role.apart or not store.check([key]):
            return {}
        why[role.key] = store.get(key).decode()
    return why


def _can_do_without(
    role: Role, running: Mapping[str, Role], results: Mapping[str, Mapping[int, Any]], scratch: Path
) -> bool:
    """Whether the run goes on although that process failed: others of its role are there, and it just died.

    What a process says itself of why the run cannot be (a RunFailed, a UserError) ends the run.
    """
    others = [r for r in running.values() if r.name == role.name and r.key != role.key]
    if not role.apart or not (others or results[role.name]):
        return False
    error = _error_file(scratch, role, 0)
    text = error.read_text() if error.is_file() else ""
    return "trainer.errors.RunFailed: " not in text and "trainer.errors.UserError: " not in text


def _lingers(scratch: Path) -> bool:
    """A process has failed some time ago and does not end: a thread of its own, or a library's teardown, holds it."""
    latest = time.time() - LINGER_S
    return any(error.stat().st_size and error.stat().st_mtime < latest for error in scratch.glob("*.json"))


def _first_failure(
    roles: Sequence[Role], groups: Mapping[str, MultiprocessContext], log_dir: Path, scratch: Path
) -> str:
    """The message of the process that failed first; the others' errors are only its echo.

    A process that was killed leaves no error file, but those that lost it do, so a signal that we did not send counts
    before all errors.
    """
    reports = []
    for role in roles:
        for i, process in enumerate(_processes(groups[role.key])):
            who, log = f"{role.name} {role.first_rank + i}", log_dir / f"{LOG_NAMES[role.name]}.{role.first_rank + i}"
            code = process.exitcode
            error = _error_file(scratch, role, i)
            if error.is_file() and error.stat().st_size:
                message = json.loads(error.read_text())["message"]
                extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
                text = extra.get("py_callstack") or str(message)
                written = error.stat().st_mtime_ns  # torch's own timestamp counts whole seconds, too coarse for echoes
                reports.append((written, who, _own_words(text), log))
            elif code and -code in (signal.SIGTERM, signal.SIGINT):
                continue
            elif code and code < 0:
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                reports.append((-2, who, f"was killed by {name}{hint}{_tail(log)}", log))
            elif code:
                reports.append((-1, who, f"ended with exit code {code}{_tail(log)}", log))
    if not reports:
        return f"a process failed without a word; its log is in {log_dir}"
    _, who, text, log = min(reports, key=lambda r: r[0])
    return f"{who} {text}\n  its log: {log}"


def _own_words(callstack: str) -> str:
    """A failure in its own words: a RunFailed's or UserError's message alone, any other with its traceback."""
    lines = callstack.rstrip().splitlines()
    for start, line in enumerate(lines):
        if (
            line.startswith(("trainer.errors.RunFailed: ", "trainer.errors.UserError: "))
            and "direct cause" not in callstack[callstack.find(line) :]
        ):
            return "failed: " + "\n".join([line.split(": ", 1)[1], *lines[start + 1 :]])
    return "failed:\n" + "\n".join(lines)


def _tail(log: Path, lines: int = 15) -> str:
    try:
        last = log.read_text(errors="replace").rstrip().splitlines()[-lines:]
    except OSError:
        return ""
    return "\n  " + "\n  ".join(last) if last else ""


def _end(groups: Mapping[str, MultiprocessContext]) -> None:
    for context in groups.values():
        if any(process.is_alive() for process in _processes(context)):
            context.close(signal.SIGTERM, timeout=END_S)
        else:
            context.close(signal.SIGTERM, timeout=0)


def _processes(context: MultiprocessContext) -> Sequence[multiprocessing.Process]:
    """The group's processes (torch gives their pids alone, and exit codes of the failed one alone)."""
    started = context._pc
    return started.processes if started is not None else ()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """torch's elastic machinery installs signal handlers and leaves them; put the caller's back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _error_file(scratch: Path, role: Role, index: int) -> Path:
    return scratch / f"{role.name}.{role.first_rank + index}.json"


def _seconds(seconds: float) -> Any:
    import datetime

    return datetime.timedelta(seconds=seconds)


class _Logs(LogsSpecs):
    """Each process's output in one file of the run's folder; rank 0 of the workers also on the screen."""

    def __init__(self, role: Role, log_dir: Path, scratch: Path) -> None:
        super().__init__(str(log_dir))
        self.role = role
        self.scratch = scratch

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where each process's output and error go."""
        folder = Path(self.root_log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        logs = {i: str(folder / f"{LOG_NAMES[self.role.name]}.{self.role.first_rank + i}") for i in envs}
        errors = {i: str(_error_file(self.scratch, self.role, i)) for i in envs}
        for i, log in logs.items():
            Path(log).write_text("")
            envs[i]["TORCHELASTIC_ERROR_FILE"] = errors[i]
        shown = {0: logs[0]} if self.role.name == "worker" and self.role.first_rank == 0 and logs else {}
        return LogsDest(
            stdouts=logs, stderrs={i: "" for i in envs}, tee_stdouts=shown, tee_stderrs={}, error_files=errors
        )
