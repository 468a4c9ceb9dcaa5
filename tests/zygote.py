"""Processes of `python -m trainer` that begin with everything imported, which takes longer than most of the tests'
runs.

A process that has imported what a run needs, and done nothing else, forks for each command line (as Android's zygote
does). Testing processes side by side share one. The fork gets the folder, the environment, the path and the streams of
a new process, and enters the module as Python's ``-m`` does. Tests of how a process starts take ``subprocess``
(``tests/cli/test_startup.py``).

Two functions of the standard library are replaced in each fork (:func:`start_by_forks`), so that its forkserver and its
recorder are forks, too. Without this a run of several processes costs 3 to 5 s of CPU more (torch is imported again),
and a run that is tracked 2 to 3 s (MLflow): more than all else that most of them do. Pictures are one pixel
(``tests/undrawn.py``): 1 s of CPU of the 1.7 s of a small run. MLflow is as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from tests.importing import import_all_of
from tests.undrawn import nothing_is_drawn

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.nn.functional",
    "torchvision.models",
    "torchvision.transforms.v2",
    "sklearn.datasets",
    "safetensors.torch",
    "hydra._internal.hydra",
    "hydra.core.override_parser.overrides_parser",
    "rich.table",
    "rich.progress",
    "PIL.Image",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
    "zmq",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.server.fastapi_app",
    "mlflow.cli",
    "uvicorn.main",
    "numpy.ma",
    "fsspec",
)
MOST = 1 << 20
"""Bytes of a request."""
PLACE = "TRAINER_TESTS_ZYGOTE"
"""Variable with the place of the session's process that forks."""
CLONE_NEWNET = 0x40000000


class Started:
    """A forked process, with what :class:`subprocess.Popen` has of it."""

    def __init__(self, argv: Sequence[str], pid: int, ended: socket.socket) -> None:
        self.args, self.pid, self._ended = argv, pid, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if (code := self._code(timeout)) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None and connection.wait([self._ended], timeout):
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
    """Asks for forks of the session's process that forks, or where there is none, of one that it starts.

    Args:
        variables: what its environment has beside ours, before anything is imported: it is then a process of its own.
        modules: what it imports beside what a run needs.

    Attributes:
        place: the socket at which that process answers. It ends with the process that has started it.
    """

    def __init__(self, variables: Mapping[str, str] | None = None, modules: Sequence[str] = ()) -> None:
        if PLACE in os.environ and variables is None:
            self.place = os.environ[PLACE]
            return
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._life, theirs = socket.socketpair()
        self.place = f"{self._folder.name}/door"
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(self.place)
            door.listen()
            fds = (door.fileno(), theirs.fileno())
            subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", *map(str, fds), *modules],
                cwd=root,
                pass_fds=fds,
                env={**os.environ, **(variables or {}), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def start(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        out: int,
        err: int,
        module: str = "trainer",
        network: str = "",
        pictures: bool = False,
        spares: int = 1,
    ) -> Started:
        """``python -m MODULE ARGV`` in that folder, with these streams.

        Args:
            network: the network namespace (``ip netns``), or ours.
            pictures: its pictures are drawn; else each is one pixel, for drawing takes longer than training.
            spares: how many ``python -m`` that it starts are forks, too.
        """
        if module == "trainer" and "tracking=none" in argv and spares == 1:
            spares = 0  # no recorder
        request = {
            "module": module,
            "argv": list(argv),
            "cwd": str(cwd),
            "env": dict(env),
            "network": network,
            "pictures": pictures,
            "spares": spares,
        }
        answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers.connect(self.place)
        socket.send_fds(answers, [json.dumps(request).encode()], [out, err])
        return Started(argv, int(answers.recv(64)), answers)


def import_all(more: Iterable[str] = ()) -> int:
    """Import with one thread, for a pool of OpenMP's would be broken in every fork; returns how many a process has."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # torch._dynamo makes a folder when it is imported
        torch = importlib.import_module("torch")
        threads = int(torch.get_num_threads())
        torch.set_num_threads(1)
        for name in MODULES:
            importlib.import_module(name)
        warnings.resetwarnings()
        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # mlflow warns of a class; the filters that our modules add stay
            import_all_of("trainer")
            for name in more:
                importlib.import_module(name)
    tempfile.tempdir = None
    gc.collect()
    gc.freeze()
    return threads


def serve(door: socket.socket, life: socket.socket) -> str:
    """Fork for each request. Returns in a fork, which then is to run the module returned.

    A first fork waits for the second, and says its process id and how it has ended.

    Args:
        door: where testing processes connect; life: readable when all of this is over.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while life not in connection.wait([door, life]):
        answers, _ = door.accept()
        if os.fork():
            answers.close()
            continue
        door.close()
        life.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        message, fds, _, _ = socket.recv_fds(answers, MOST, 2)
        if not (pid := os.fork()):
            answers.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return _become(json.loads(message), dict(enumerate(fds, 1)), fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # the testing process has ended
            answers.send(str(pid).encode())
            answers.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    os._exit(0)


def _become(request: dict[str, Any], places: Mapping[int, int], fds: Iterable[int]) -> str:
    """Make this fork what a new process would be, with open files at their places; returns the module that it is to
    run."""
    for place, fd in places.items():
        os.dup2(fd, place)
    for fd in set(fds):
        os.close(fd)
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    if request.get("network"):
        enter_network(request["network"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    theirs = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd(), *theirs, *(entry for entry in sys.path[1:] if entry not in ours)]
    time.tzset()
    sys.argv[:] = ["-m", *request["argv"]]
    if not request.get("pictures"):
        nothing_is_drawn(pytest.MonkeyPatch())
    start_by_forks(request.get("spares", 1))
    if request["module"] == "trainer":
        forget_mlflow()
    return str(request["module"])


def enter_network(name: str) -> None:
    """As ``ip netns exec`` does."""
    with Path("/run/netns", name).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", name)


def forget_mlflow() -> None:
    """Neither the launcher nor a rank imports MLflow."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        del sys.modules[name]


class Spare:
    """A fork that was made while nothing ran in this process, and is idle until it becomes what this process starts."""

    made: ClassVar[list[Spare]] = []

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.made.append(self)
        self.pid = os.fork()
        if not self.pid:
            for spare in self.made:
                spare.socket.close()
            self.made.clear()
            _serve_a_fork(theirs)
        theirs.close()

    def become(self, what: dict[str, Any], fds: Mapping[int, int]) -> int:
        """Have the fork run that, with open files at their places; returns its process id."""
        with self.socket:
            told = {"env": dict(os.environ), **what, "places": list(fds)}
            socket.send_fds(self.socket, [json.dumps(told).encode()], list(fds.values()))
        return self.pid


def start_by_forks(spares: int) -> None:
    """The forkserver that this process starts, and as many ``python -m``, are forks, too."""
    spawn, execute = multiprocessing.util.spawnv_passfds, subprocess._fork_exec  # type: ignore[attr-defined]
    forkserver, modules = Spare(), [Spare() for _ in range(spares)]

    def spawned(path: Any, args: Sequence[str], fds: Sequence[int]) -> int:
        if forkserver.socket.fileno() < 0 or "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, fds)
        return forkserver.become({"code": args[-1]}, {fd: fd for fd in fds})

    def executed(args: Sequence[str], *others: Any) -> int:
        cwd, env, streams, new_session = others[3], others[4], (others[5], others[8], others[10]), others[14]
        options = [part for part in args[:3] if part != "-u"]  # torchrun's
        if not modules or options[:2] != [sys.executable, "-m"] or not set(others[2]) <= {others[12]}:
            return int(execute(args, *others))
        module, begin = modules.pop(0), list(args).index("-m") + 1
        what = {
            "module": args[begin],
            "argv": list(args[begin + 1 :]),
            "cwd": os.fsdecode(cwd or os.getcwd()),
            "session": new_session,
        }
        if env is not None:
            what["env"] = dict(os.fsdecode(entry).split("=", 1) for entry in env)
        return module.become(what, {place: fd for place, fd in enumerate(streams) if fd >= 0})

    multiprocessing.util.spawnv_passfds = spawned  # type: ignore[assignment]
    subprocess._fork_exec = executed  # type: ignore[attr-defined]


def _serve_a_fork(requests: socket.socket) -> NoReturn:
    message, fds, _, _ = socket.recv_fds(requests, MOST, 8)
    requests.close()
    if not message:
        os._exit(0)
    request = json.loads(message)
    apart = [os.dup2(fd, 200 + number) for number, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    places = dict(zip(request["places"], apart, strict=True))
    if "module" in request:
        if request["session"]:
            os.setsid()
        run(_become(request, places, apart))
    else:
        for place, fd in places.items():
            os.dup2(fd, place)
            os.close(fd)
        forget_mlflow()
        os.environ.clear()
        os.environ.update(request["env"])
        sys.modules.pop("trainer.launch.preload", None)  # what it does, it does when it is imported
        sys.argv[:] = ["-c"]
        exec(request["code"], {"__name__": "__main__"})
    os._exit(0)


def run(module: str) -> None:
    """As ``python -m MODULE`` goes on when it has imported everything."""
    sys.modules["torch"].set_num_threads(usual)
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


if __name__ == "__main__":
    usual = import_all(sys.argv[3:])
    door, life = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    run(serve(door, life))
