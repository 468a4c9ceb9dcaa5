"""Which tests run in one process of `make test`, and which begin first.

Tests of a file run in one process: what its fixtures have launched is launched once. xdist's own ``--dist loadgroup``
has no effect from pytest 9.2 on (pytest-dev/pytest-xdist#1386), and says nothing. The longest begin first, so that all
processes end together.
"""

from __future__ import annotations

import re
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
LONGEST = (
    "strategies/test_conformance.py",
    "faults/test_restarts.py",
    "faults/test_elastic.py",
    "checkpoint/test_grid.py",
    "faults/test_lost.py",
    "faults/test_ledgers.py",
    "strategies/test_missing.py",
    "e2e/test_tracking.py",
    "checkpoint/test_identity.py",
    "launch/test_server_hosts.py",
    "launch/test_roles.py",
    "strategies/test_tables.py",
    "faults/test_returns.py",
    "job/test_batch_size_search.py",
    "e2e/test_run.py",
    "launch/test_rendezvous.py",
    "simulation/test_simulation.py",
    "e2e/test_weights.py",
    "e2e/test_canaries.py",
    "checkpoint/test_async_resume.py",
    "e2e/test_images.py",
    "data/test_streams.py",
    "tracking/test_one_run.py",
    "faults/test_snapshots.py",
    "e2e/test_references.py",
    "launch/test_forkserver.py",
    "data/test_bombs.py",
    "faults/test_preemption.py",
    "e2e/test_servers.py",
    "launch/test_tasks.py",
    "strategies/test_ddp.py",
    "strategies/pserver/test_hostile.py",
    "strategies/test_truth.py",
    "e2e/test_own_code.py",
    "planning/test_plan.py",
    "e2e/test_compiled.py",
    "checkpoint/test_remote.py",
    "weights/test_checkpoint_weights.py",
    "checkpoint/test_increments_of_runs.py",
    "e2e/test_click_predictions.py",
    "faults/test_nonfinite.py",
    "strategies/test_optimization.py",
    "faults/test_full_disk.py",
    "cli/test_bad_input.py",
    "config/test_schema.py",
    "config/test_redact.py",
    "cli/test_suggestions.py",
    "faults/test_strangers.py",
)


PROCESSES = ("checkpoint", "e2e", "faults", "job", "launch", "simulation", "strategies", "tracking")
"""Folders whose tests start processes: of a parametrized test there ``make test`` runs the first case alone, and
``make test-all`` runs all."""


def starts_processes(nodeid: str) -> bool:
    """Whether the test is in one of those folders."""
    return _file(nodeid).partition("/")[0] in PROCESSES


def group(nodeid: str) -> str:
    """Tests of the same group run in one process."""
    file = _file(nodeid)
    found = re.search(APART[file], nodeid) if file in APART else None
    return f"{file} {found[1]}" if found else file


def place(nodeid: str) -> int:
    """A test of a lower place begins earlier."""
    file = _file(nodeid)
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


class ByLaunch(LoadScopeScheduling):
    """Hands out groups as a whole, the longest first."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the groups stay in the order of the tests, see ``place``

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
