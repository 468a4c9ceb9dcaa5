"""benchmarks/gpu.py, rehearsed on a null GPU: each part gives its rows, and none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.null_gpu import machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
needs_null_gpu = pytest.mark.skipif(bool(machine.missing()), reason=f"a null GPU needs {machine.missing()}")


@pytest.mark.all
@needs_null_gpu
@pytest.mark.parametrize(
    ("part", "rows", "rated"),
    [
        ("waits", 3, 0),
        *(
            pytest.param(part, rows, rated, marks=pytest.mark.long)
            for part, rows, rated in (("resident", 5, 5), ("rival", 2, 2), ("compile", 5, 5), ("jpeg", 4, 4))
        ),
    ],
)
def test_a_part_gives_its_rows(part: str, rows: int, rated: int, library: Path) -> None:
    found = machine.run(library, "tests.null_gpu.rehearsal", {"part": part})
    assert [row["note"] for row in found if row["note"].startswith("failed")] == []
    assert len(found) == rows and sum(row["rate"] is not None for row in found) == rated
    if part == "waits":
        assert all(row["note"].endswith("as the gate has it") for row in found), found


def benchmark(*typed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *typed],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )


@pytest.mark.all
def test_the_table_is_written_row_by_row_and_a_missing_rival_is_no_verdict(tmp_path: Path) -> None:
    done = benchmark("--only", "versions", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert rows[0]["case"].startswith(f"Python {sys.version.split()[0]}, torch ")
    assert "no verdict" in done.stdout and (tmp_path / "gpu.md").read_text().startswith("| case | images/s |")


def test_a_part_that_takes_too_long_or_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    (late,) = gpu.measured_part("versions", 0.2)
    assert late.note == "was cut off after 0 s"
    monkeypatch.setattr(sys, "executable", "false")
    (failed,) = gpu.measured_part("versions", 20)
    assert failed.note.startswith("exit code 1")


@pytest.mark.parametrize(("strong", "resident", "said"), [(1.01, 0.98, "reached"), (0.99, 0.9, "missed")])
def test_the_verdict_is_that_of_the_worst_row(
    strong: float, resident: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    rows = [gpu.Row("rival", "alone", 1.0, strong=2.0, resident=resident), gpu.Row("rival", "NCCL", 1.0, strong=strong)]
    assert gpu.verdict(rows).count(said) == 2
