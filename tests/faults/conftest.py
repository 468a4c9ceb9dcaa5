"""What several files of this folder compare with."""

from __future__ import annotations

import pytest

from tests.faults.loopback import BASE
from tests.runs import losses, trainer


@pytest.fixture(scope="session")
def by_one_worker(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Updates and losses of one worker's run, which those of several hosts equal."""
    folder = tmp_path_factory.mktemp("one_worker")
    done = trainer(*BASE, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")
