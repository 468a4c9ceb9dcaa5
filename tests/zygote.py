"""Processes of `python -m trainer` that begin with everything imported, which takes longer than most of the tests' runs.

A process that has imported what a run needs, and done nothing else, forks for each command line (as Android's zygote does).
The fork gets the folder, the environment, the path and the streams of a new process, and enters the module as Python's
``-m`` does. Its forkserver is such a fork, too. Tests of how a process starts take ``subprocess`` (``tests/cli/test_startup.py``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "torch", "torch._dynamo", "torch.distributed.nn.functional", "torchvision.models", "torchvision.transforms.v2",
    "sklearn.datasets", "safetensors.torch", "hydra._internal.hydra", "hydra.core.override_parser.overrides_parser",
    "rich.table", "rich.progress", "PIL.Image", "zmq", "trainer.cli.commands", "trainer.cli.sweep", "trainer.job.job", "trainer.worker.train",
    "trainer.launch.forkserver",
)  # fmt: skip
MOST = 1 << 20
"""Bytes of a request."""


class Started:
    """A forked process, with what :class:`subprocess.Popen` has of it."""

    def __init__(self, argv: Sequence[str], pid: int, ended: socket.socket) -> None:
        self.args, self.pid, self._ended = argv, pid, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = int(self._ended.recv(64) or -signal.SIGKILL)
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """Started once by a testing process; ends with it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[1])
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
                cwd=root, env={**os.environ, "PYTHONPATH": root}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def start(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], out: int, err: int) -> Started:
        """``python -m trainer ARGV`` in that folder, with these streams."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"argv": list(argv), "cwd": str(cwd), "env": dict(env)}
        with theirs:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno(), out, err])
        return Started(argv, int(ours.recv(64)), ours)


def import_all() -> int:
    """Import with one thread, for a pool of OpenMP's would be broken in every fork; returns how many a process has."""
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # torch._dynamo makes a folder when it is imported
        torch = importlib.import_module("torch")
        threads = int(torch.get_num_threads())
        torch.set_num_threads(1)
        for name in MODULES:
            importlib.import_module(name)
    tempfile.tempdir = None
    gc.collect()
    gc.freeze()
    return threads


def serve(requests: socket.socket) -> None:
    """Fork for each request, and tell how the forks end. Returns in a fork."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            while (ended := _ended())[0]:
                with waiting.pop(ended[0]) as told, contextlib.suppress(OSError):
                    told.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        if requests in ready:
            message, fds, _, _ = socket.recv_fds(requests, MOST, 3)
            if not message:  # the testing process has ended
                os._exit(0)
            pid = os.fork()
            if not pid:
                for held in (requests, *waiting.values()):
                    held.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.close(reader)
                os.close(writer)
                _become(json.loads(message), fds)
                return
            for fd in fds[1:]:
                os.close(fd)
            waiting[pid] = socket.socket(fileno=fds[0])
            waiting[pid].send(str(pid).encode())


def _ended() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Make this fork what a new process would be."""
    os.close(fds[0])
    for place, fd in enumerate(fds[1:], 1):
        os.dup2(fd, place)
    for fd in set(fds[1:]):
        os.close(fd)
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    theirs = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd(), *theirs, *(entry for entry in sys.path[1:] if entry not in ours)]
    time.tzset()
    sys.argv[:] = ["-m", *request["argv"]]
    fork_the_forkserver()


def fork_the_forkserver() -> None:
    """A run's forkserver is a fork, too: made now, while nothing runs in this process, and idle until it is wanted."""
    spawn = multiprocessing.util.spawnv_passfds
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (spare := os.fork()):
        ours.close()
        _serve_forks(theirs)
    theirs.close()

    def spawned(path: Any, args: Sequence[str], fds: Sequence[int]) -> int:
        if ours.fileno() < 0 or "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, fds)
        with ours:
            request = {"run": args[-1], "env": dict(os.environ), "fds": list(fds)}
            socket.send_fds(ours, [json.dumps(request).encode()], list(fds))
        return spare

    multiprocessing.util.spawnv_passfds = spawned


def _serve_forks(requests: socket.socket) -> NoReturn:
    message, fds, _, _ = socket.recv_fds(requests, MOST, 8)
    requests.close()
    if not message:
        os._exit(0)
    request = json.loads(message)
    apart = [os.dup2(fd, 200 + number) for number, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, place in zip(apart, request["fds"], strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.modules.pop("trainer.launch.preload", None)  # what it does, it does when it is imported
    sys.argv[:] = ["-c"]
    exec(request["run"], {"__name__": "__main__"})
    os._exit(0)


if __name__ == "__main__":
    usual = import_all()
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["torch"].set_num_threads(usual)
    runpy._run_module_as_main("trainer")  # type: ignore[attr-defined]
