"""Imports once, in the forkserver, what all processes of a run need."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from trainer.config.run_config import RunConfig
from trainer.host import machine_limits
from trainer.host.signals import beginning_undisturbed, leave_to_launcher, signal_name

VARIABLE = "TRAINER_PRELOAD"
"""The variable that hands module names to the forkserver, which removes it from its environment."""
LEFT_OUT = ("hydra", "omegaconf", "antlr4", "mlflow", "rich", "pygments", "matplotlib", "__main__", "__mp_main__")
"""Packages that only the parent needs."""
ALWAYS = ("trainer.launch.forkserver", "torch._dynamo")
"""Modules for every process. The first optimizer imports torch._dynamo, for longer than an epoch of a small model."""
DEPTH = 2
ENDED_S = 1.0
"""Longest wait for the end of a forkserver whose connection has closed."""


def imported_since(before: Collection[str]) -> list[str]:
    """The modules that this process has imported since ``before``: ours, and other packages down to ``DEPTH``."""
    new = [n for n in list(sys.modules) if n not in before and (n.count(".") < DEPTH or n.startswith("trainer."))]
    known = {*sys.stdlib_module_names, *LEFT_OUT}
    return [name for name in new if name.partition(".")[0] not in known]


def modules_of(config: RunConfig, entries: Iterable[str]) -> list[str]:
    """The modules that the config's ``_target_``s and the processes' entry functions are in."""
    nodes = [config.model, config.loss, config.optimizer, *config.callbacks, *config.metrics.values()]
    named = [*entries, config.data._target_, config.scheduler._target_]
    named += [str(node.get("_target_", "")) for node in nodes]
    return [module for name in named if (module := name.replace(":", ".").rpartition(".")[0])]


def start_forkserver(names: Iterable[str], folder: Path) -> None:
    """Start the forkserver, which imports these modules for all processes; a running forkserver stays as it is.

    Args:
        folder: for temporary files of the imports: torch._dynamo makes a folder.
    """
    multiprocessing.set_forkserver_preload([__name__])
    wanted = list(dict.fromkeys([*ALWAYS, *names]))
    os.environ[VARIABLE] = json.dumps({"path": sys.path, "names": wanted, "folder": str(folder)})
    try:
        with beginning_undisturbed():  # multiprocessing's tracker does not ignore SIGUSR1
            multiprocessing.resource_tracker.ensure_running()
        with beginning_undisturbed():  # the tracker's start has unblocked two of the signals
            multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop(VARIABLE, None)  # two launches in threads of one process may both have set it


def why_ended() -> str:
    """Why the forkserver has ended, as far as this process can tell; the forkserver's own output is on the screen."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    what = "the forkserver, from which the run's processes come, has ended"
    deadline = time.monotonic() + ENDED_S
    while pid is not None and time.monotonic() < deadline:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # multiprocessing reaps it
        except ChildProcessError:
            break
        if found is None:
            time.sleep(0.01)
        elif found.si_code == os.CLD_EXITED:
            return (
                f"{what} with an error of its own, which stands above. If that is {os.strerror(errno.EAGAIN)!r}, "
                f"{machine_limits.no_process()}"
            )
        else:
            hint = " (out of memory?)" if found.si_status == signal.SIGKILL else ""
            return f"{what}: it was killed by {signal_name(found.si_status)}{hint}"
    return f"{what}. If {os.strerror(errno.EAGAIN)!r} stands above, {machine_limits.no_process()}"


def _import(path: list[str], names: list[str], folder: str) -> None:
    """In the forkserver: import the modules. One that cannot be imported fails in the process that needs it.

    Torch uses one thread here: a pool of OpenMP threads would be broken in every forked process.
    """
    before = signal.getsignal(signal.SIGINT)
    leave_to_launcher()
    sys.path[:], tempfile.tempdir = path, folder
    gc.disable()
    import torch

    torch.set_num_threads(1)
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    tempfile.tempdir = None
    gc.freeze()  # shared by all processes: a collection would copy it into each
    gc.enable()
    signal.signal(signal.SIGINT, before)
    atexit.register(_leave, os.getpid())


def _leave(forkserver: int) -> None:
    """End the forkserver without tearing down its modules, some of which would print errors."""
    if os.getpid() == forkserver:
        os._exit(0)


if VARIABLE in os.environ:
    _import(**json.loads(os.environ.pop(VARIABLE)))
