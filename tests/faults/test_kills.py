"""SIGKILL of any process of a run, at any moment: the same command with resume=auto ends as if nothing had happened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.checkpoint.test_identity import check_equal

BASE = (
    "+recipe=digits_lenet", "data.batch_size=16", "limit_val_batches=3", "execution.log_every=5", "epochs=2", "tracking=none",
    "execution.threads=1", "checkpoint.every_steps=7", "ema.decay=0.9",
)  # fmt: skip
STRATEGIES = {
    "single": (),
    "a child": ("launch=forkserver", "data.num_workers=1"),
    "collective": ("launch.nproc=2",),
    "local_sgd": ("launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=3"),
}
MOST = 8
"""Times that a run is started again."""
SHORT, LONG = 2, 60
"""Kills of each strategy."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, float]]:
    """The run of a strategy that nobody kills, and its seconds."""
    known: dict[str, tuple[Path, float]] = {}

    def run(strategy: str) -> tuple[Path, float]:
        if strategy not in known:
            folder, began = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
            ended = runs.trainer(*BASE, *STRATEGIES[strategy], "hydra.run.dir=run", cwd=folder)
            assert ended.returncode == 0, ended.stderr
            known[strategy] = folder / "run", time.monotonic() - began
        return known[strategy]

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.long] * (n >= SHORT)) for n in range(LONG)])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    number: int, strategy: str, undisturbed: Callable[[str], tuple[Path, float]], tmp_path: Path
) -> None:
    whole, seconds = undisturbed(strategy)
    chance = random.Random(f"{strategy} {number}")
    command = (*BASE, *STRATEGIES[strategy], "hydra.run.dir=run")
    process = runs.start(*command, cwd=tmp_path)
    time.sleep(chance.uniform(0.1, 1.0) * seconds)
    if process.poll() is None:
        victim = chance.choice(runs.family(process.pid))
        everybody = runs.family(process.pid)
        victim.kill()
        if victim.pid == process.pid:
            psutil.wait_procs(everybody, timeout=60)
            assert not runs.alive(everybody), "who loses the launcher ends"
        process.wait(300)
    again = 0
    while process.poll() != 0:
        again += 1
        assert again <= MOST, (tmp_path / "screen.txt").read_text()
        process = runs.start(*command, "resume=auto", cwd=tmp_path)
        process.wait(300)
    check_equal(whole, tmp_path / "run")
