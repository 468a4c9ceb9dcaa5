"""Tests that share a launch run in one process, whatever pytest and xdist make of their own ways to say so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.runs import ROOT
from tests.scheduling import APART, group, place, turn

FILE = """
import os, pathlib, pytest

@pytest.fixture(scope="module")
def process():
    return os.getpid()

@pytest.mark.parametrize("n", range(7))
def test_shares(process, n):
    with pathlib.Path(__file__).with_suffix(".txt").open("a") as file:
        file.write(f"{process}\\n")
"""


@pytest.mark.long
def test_tests_of_a_file_run_in_one_process_and_files_in_several(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"test_{name}.py").write_text(FILE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran_in = [path.read_text().split() for path in sorted(tmp_path.glob("test_*.txt"))]
    assert [len(pids) for pids in ran_in] == [7] * 4
    assert [len(set(pids)) for pids in ran_in] == [1] * 4 and len({pids[0] for pids in ran_in}) == 2


def test_launches_of_a_long_file_are_apart_and_those_that_start_processes_are_first() -> None:
    of: dict[str, set[str]] = defaultdict(set)
    for nodeid in (
        "tests/strategies/test_conformance.py::test_total_sums_over_workers[pserver_sync-4]",
        "tests/strategies/test_conformance.py::test_every_process_writes_its_own_log[averaging-2]",
        "tests/strategies/test_conformance.py::test_local_sgd_with_one_step_equals_collective[2]",
        "tests/strategies/test_tables.py::test_sync_servers_equal[3-2-sgd-whole]",
        "tests/strategies/test_tables.py::test_sync_servers_equal[3-2-adam-hashed]",
        "tests/strategies/test_tables.py::test_one_worker_without_a_queue_equals[ssp-sgd]",
    ):
        of[group(nodeid)].add(nodeid.partition("[")[2])
    assert sorted(map(sorted, of.values())) == [
        ["2]", "averaging-2]"],
        ["3-2-adam-hashed]", "3-2-sgd-whole]"],
        ["pserver_sync-4]"],
        ["ssp-sgd]"],
    ]
    assert group("tests/null_gpu/test_gate.py::test_a[fp16]") == group("tests/null_gpu/test_updates.py::test_b")
    assert place("tests/strategies/test_conformance.py::test_a") < place("tests/host/test_notes_board.py::test_a")


def test_each_test_has_one_turn_which_is_that_of_its_group() -> None:
    names = [f"tests/{folder}/test_{n}.py::test_a[{n}]" for folder in ("faults", "cli", "null_gpu") for n in range(40)]
    assert {turn(name, 1) for name in names} == {0}
    assert {turn(name, 4) for name in names} == {0, 1, 2, 3}
    assert len({turn(name, 4) for name in names if "null_gpu" in name}) == 1


def test_files_that_are_named_are_there() -> None:
    assert [file for file in APART if not (ROOT / "tests" / file).is_file()] == []
