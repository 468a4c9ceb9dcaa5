"""Commands against a Ray cluster of several nodes on this host (:mod:`tests.engines.ray_nodes`).

Ray has an environment of its own: ``make ray`` makes ``build/ray``. Its Python finds this project and what that needs
by PYTHONPATH, as a user's environment with both would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("TRAINER_TEST_RAY", ROOT / "build" / "ray" / "bin" / "python"))
"""A Python that has ray."""


class RayCluster:
    """A running cluster. ``run`` and ``start`` give a command the Python that has ray, and the cluster's address."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.environment: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        with (folder / "cluster.log").open("w") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), str(ROOT / "tests" / "engines" / "ray_nodes.py"), str(count)],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.address = self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, (self.folder / "cluster.log").read_text()[-3000:]
        return line

    def ask(self, what: str) -> None:
        """``kill N``, ``drain N`` or ``add``."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self._read() == "done"

    def start(self, folder: Path, *words: str) -> subprocess.Popen[str]:
        """Start ``python -m trainer WORDS`` on two hosts; its output goes to FOLDER/said."""
        out = (folder / "said").open("a")
        where = ["launch=ray", "launch.nnodes=2", "launch.nproc=1", f"launch.cluster={self.address}"]
        command = [str(PYTHON), "-m", "trainer", *words, *where]
        return subprocess.Popen(command, cwd=folder, env=self.environment, stdout=out, stderr=out, text=True)

    def stop(self) -> None:
        """End all nodes."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=60)
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ray_cluster(folder: Path, count: int) -> Iterator[RayCluster]:
    """Context manager: a running cluster of so many nodes."""
    made = RayCluster(folder, count)
    try:
        yield made
    finally:
        made.stop()


def missing() -> str:
    """Why no cluster can be started here; '': nothing is missing."""
    if not PYTHON.exists():
        return f"no {PYTHON}: make ray"
    version = subprocess.run([str(PYTHON), "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
    return "" if version.stdout.decode().strip() == str(sys.version_info[:2]) else "another version of Python"
