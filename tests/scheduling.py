"""Which tests run in one process of `make test`, and which begin first.

Tests of a file run in one process: what its fixtures have launched is launched once. xdist's own ``--dist loadgroup``
has no effect from pytest 9.2 on (pytest-dev/pytest-xdist#1386), and says nothing. The longest begin first, so that all
processes end together.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from xdist.scheduler import LoadScopeScheduling

EACH = r"(::.*)"
APART = {
    "strategies/test_conformance.py": r"\[(?:\w+-)?(\d)",
    "strategies/test_tables.py": r"\[(\d-\d)-",
    "simulation/test_simulation.py": EACH,
    "e2e/test_run.py": EACH,
    "launch/test_tasks.py": EACH,
    "faults/test_ledgers.py": EACH,
    "faults/test_elastic.py": EACH,
    "faults/test_kills.py": r"\[\d+-(.*)\]",
    "checkpoint/test_identity.py": EACH,
    "checkpoint/test_grid.py": EACH,
    "e2e/test_compiled.py": r"(::test_[a-z]+)",
}
"""Long files of several launches: tests share one if this finds the same text in their names."""
TOGETHER = ("null_gpu",)
"""Folders whose tests share what one process has imported, in all their files. They take minutes, and begin first."""
PROCESSES = (
    "simulation",
    "faults",
    "equality",
    "checkpoint",
    "launch",
    "strategies",
    "e2e",
    "worker",
    "tracking",
    "job",
    "sweep",
    "service",
    "tasks",
    "models",
    "optim",
    "null_gpu",
)
"""Folders whose tests take long, most of them because they start processes; those with the longest tests begin first.
Of a parametrized test there ``make test`` runs the first case alone, and ``make test-all`` runs all."""


def starts_processes(nodeid: str) -> bool:
    """Whether the test is in one of those folders."""
    return _folder(nodeid) in PROCESSES


def turn(nodeid: str, turns: int) -> int:
    """In which of so many turns a test runs that is left out in the others; those of a group are in one."""
    return zlib.crc32(group(nodeid).encode()) % turns


def group(nodeid: str) -> str:
    """Tests of the same group run in one process."""
    if (folder := _folder(nodeid)) in TOGETHER:
        return folder
    file = _file(nodeid)
    found = re.search(APART[file], nodeid) if file in APART else None
    return f"{file} {found[1]}" if found else file


def place(nodeid: str) -> int:
    """A test of a lower place begins earlier."""
    folders = (*TOGETHER, *PROCESSES)
    return folders.index(folder) if (folder := _folder(nodeid)) in folders else len(folders)


def _folder(nodeid: str) -> str:
    return _file(nodeid).partition("/")[0]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


class ByLaunch(LoadScopeScheduling):
    """Hands out groups as a whole, the longest first."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the groups stay in the order of the tests, see ``place``

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
