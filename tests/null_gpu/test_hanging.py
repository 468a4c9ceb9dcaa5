"""A worker whose GPU waits for a worker that hangs says who it is, wherever the process itself waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.null_gpu import machine
from tests.null_gpu.hanging import TIMEOUT_S

pytestmark = pytest.mark.skipif(bool(machine.missing()), reason=machine.missing())
MISSING = f"worker 1 did not arrive at a sum over the workers within {TIMEOUT_S:g} s (strategy.timeout_s)"


@pytest.mark.parametrize(
    ("waits", "how"), [("reads", "raised"), ("stuck", "sent"), pytest.param("meets", "raised", marks=pytest.mark.all)]
)
def test_the_missing_worker_is_named(library: Path, waits: str, how: str) -> None:
    found = machine.run(library, "tests.null_gpu.hanging", waits)
    assert found == {"how": how, "error": MISSING, "who": ["worker 1"]}


def test_a_gpu_that_comes_late_is_waited_for(library: Path) -> None:
    assert machine.run(library, "tests.null_gpu.hanging", "late") == {"how": "done", "error": "", "who": []}
