"""A run that waits at a gate while a test does something to it, and none of whose processes outlives the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.pace import wait_for
from tests.runs import alive, family, kill, start
from tests.zygote import Started


@contextmanager
def held_up(
    folder: Path, waits: Callable[[Path], bool], *command: str, ends_s: float
) -> Iterator[tuple[Started, Path, list[psutil.Process]]]:
    """The command, its run's folder and its processes, from when ``waits`` is true of the folder; afterwards the run
    has to end.

    Args:
        folder: the working directory; the run is in ``run`` below it, and its output in ``screen.txt``.
        ends_s: longest wait for its end, after the test has let it go on.
    """
    process, run = start(*command, cwd=folder), folder / "run"
    everybody: list[psutil.Process] = []

    def there() -> bool:
        assert process.poll() is None, (folder / "screen.txt").read_text()
        return waits(run)

    try:
        wait_for(there, 90, "the workers wait")
        everybody = family(process.pid)
        yield process, run, everybody
        process.wait(ends_s)
        wait_for(lambda: not alive(everybody), 15, f"{alive(everybody)} end")
    finally:
        process.kill()
        kill(alive(everybody))
