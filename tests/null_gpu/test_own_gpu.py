"""A worker opens its own GPU and no other: each costs some 500 MB of a GPU that another worker needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.null_gpu import machine

pytestmark = pytest.mark.skipif(bool(machine.missing()), reason=f"a null GPU needs {machine.missing()}")


def test_the_second_worker_opens_the_second_gpu_alone_and_names_its_memory(library: Path, tmp_path: Path) -> None:
    found = machine.run(library, "tests.null_gpu.own_gpu", str(tmp_path), 2)
    *steps, (last, seen) = found["steps"]
    assert dict(steps) == {
        "ask torch for the GPUs": [],
        "limit the memory of a trial": [1],
        "settings": [1],
        "batches": [1],
        "update": [1],
        "checkpoint": [1],
        "best model": [1],
        "lack of memory": [1],
    }
    assert found["same"]
    assert (last, seen) == ("carelessly", [0, 1]), "otherwise the steps before could not fail"
    assert found["said"].startswith(
        "cuda:1 is out of memory after 0 updates, with batches of 32 samples per worker; the"
    )
    assert "GiB. The same update in two parts" in found["said"] and "Tried to allocate 100.00 GiB" in found["said"]
