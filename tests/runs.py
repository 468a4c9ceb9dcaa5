"""Starts `python -m trainer` as a user does, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.zygote import Started, Zygote

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["+recipe=digits_lenet", "epochs=1", "execution.log_every=20"]


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment with the checkout on the path and no tracking server of somebody else."""
    kept = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, **extra}


@cache
def zygote() -> Zygote:
    """The one of this process."""
    return Zygote()


def trainer(
    *argv: str,
    cwd: Path,
    timeout: float = 1200,
    module: str = "trainer",
    pictures: bool = False,
    spares: int = 1,
    network: str = "",
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, see ``Zygote.start``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = zygote().start(
            argv, cwd, environment(**extra), out.fileno(), err.fileno(), module, network, pictures, spares
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def script(code: str, *argv: str, cwd: Path, **extra: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, in a process of its own."""
    return trainer(code, *argv, cwd=cwd, module="tests.script", **extra)


def start(*argv: str, cwd: Path, module: str = "trainer", spares: int = 1, **extra: str) -> Started:
    """Start a command line; its output goes to ``screen.txt`` in the folder."""
    with (cwd / "screen.txt").open("w") as screen:
        return zygote().start(argv, cwd, environment(**extra), screen.fileno(), screen.fileno(), module, spares=spares)


TORCHRUN: dict[str, Any] = {"module": "torch.distributed.run", "spares": 2}


def torchrun(*argv: str) -> list[str]:
    """What torchrun is told to start two workers of a command line; goes with ``TORCHRUN``."""
    return ["--standalone", "--nproc-per-node", "2", "-m", "trainer", *argv]


def start_afresh(*argv: str, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """As :func:`start`, by a new Python: its arguments are those that other users of the machine can see."""
    with (cwd / "screen.txt").open("w") as screen:
        command = [sys.executable, "-m", "trainer", *argv]
        return subprocess.Popen(command, cwd=cwd, env=environment(**extra), stdout=screen, stderr=screen, text=True)


def family(pid: int) -> list[psutil.Process]:
    """A process and all it has started."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [p for p in processes if _runs(p)]


def listening(processes: Iterable[psutil.Process]) -> set[int]:
    """The ports at which they listen, of those that still run."""
    found: set[int] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each; one may have ended before, as the copies of servers do, and others with who has started them."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return False


def read(path: Path) -> dict[str, Any]:
    """A JSON file, or nothing yet."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def points(run_dir: Path, name: str) -> list[float]:
    """All values of a metric in metrics.jsonl, in order."""
    return [p["metrics"][name] for p in _told(run_dir) if name in p["metrics"]]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Updates and training losses in metrics.jsonl, in order."""
    return [(p["step"], p["metrics"]["train/loss"]) for p in _told(run_dir) if "train/loss" in p["metrics"]]


def _told(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are written whole."""
    whole, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def mlflow_runs(folder: Path) -> list[Any]:
    """All runs in the folder's mlflow.db."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
