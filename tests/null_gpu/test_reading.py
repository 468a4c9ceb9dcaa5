"""Batches of reading processes reach a GPU by one copy, without a wait, and their memory is not reused before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.null_gpu import machine
from tests.null_gpu.reading import BATCH, SAMPLES

pytestmark = pytest.mark.skipif(bool(machine.missing()), reason=f"a null GPU needs {machine.missing()}")

READ = 2 * SAMPLES // BATCH
"""Batches of two epochs."""


def test_batches_are_copied_from_where_they_were_written_and_held_until_the_copy_is_done(library: Path) -> None:
    found = machine.run(library, "tests.null_gpu.reading", {"registers": True})
    assert found["waits"] == [] and found["right"] == READ
    assert found["held"] == READ, "the null GPU has not copied one yet"
    assert found["registered"] == READ, "a slot is used again when its batch is freed, and none was"
    assert found["left"] == 0 and found["events"] == READ


def test_without_registered_memory_each_batch_would_wait(library: Path) -> None:
    found = machine.run(library, "tests.null_gpu.reading", {"registers": False})
    assert {kind for kind, _, _ in found["waits"]} == {"copy cpu to cuda"}
    assert sum(n for _, _, n in found["waits"]) == 2 * READ, "images and labels"


def test_memory_that_cuda_refuses_is_named_with_what_to_type(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_GPU_REFUSES", "true")
    with pytest.raises(AssertionError, match=r"CUDA cannot page-lock .* Type data.pin_memory=false"):
        machine.run(library, "tests.null_gpu.reading", {"registers": True})
