"""The CUDA runtime of a null GPU, compiled once for all tests of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.null_gpu import machine


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA runtime of a null GPU."""
    return machine.build(tmp_path_factory.mktemp("null_gpu"))
