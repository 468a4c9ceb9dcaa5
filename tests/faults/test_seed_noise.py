"""Async, ssp and geo with several workers: a run that was killed and goes on is no better and no worse than others of
other seeds.

With ``TRAINER_NOISE=FILE`` each mode leaves its row of the table in docs/reliability.md there.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

import psutil
import pytest
from scipy import stats

from tests import runs
from tests.pace import wait_for
from trainer.checkpoint import store

FILE = "TRAINER_NOISE"
"""The variable that names the file."""
SEEDS = range(6)
BATCHES = 312
BASE = (
    "+recipe=wide_and_deep",
    f"data.train_rows={64 * BATCHES}",
    "data.val_rows=10000",
    "data.hash_size=2001",
    "model.hidden=[16]",
    "data.batch_size=64",
    "data.lease_batches=4",
    "epochs=2",
    "tracking=none",
    "execution.threads=1",
    "scheduler.warmup_steps=20",
    "checkpoint.every_steps=10",
    "launch.nproc=2",
    "launch.servers=2",
    "strategy.ledger=true",
    "strategy.persistables=false",
    "verbosity=quiet",
    "hydra.run.dir=run",
)
MODES = {
    "async": ("strategy=pserver_async",),
    "ssp": ("strategy=pserver_ssp", "strategy.staleness=2"),
    "geo": ("strategy=pserver_geo", "strategy.k_steps=4", "resume.allow_changes=true"),
}
MOST = 1.5
"""Standard deviations of the undisturbed seeds that the means may differ by. Where servers lose every second row at a
resume, async's differ by 3 to 4."""


def auc(run: Path) -> float:
    return float(runs.read(run / "result.json")["metrics"]["val/auc"])


def undisturbed(folder: Path, command: tuple[str, ...]) -> float:
    folder.mkdir()
    ended = runs.trainer(*command, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return auc(folder / "run")


def killed(folder: Path, command: tuple[str, ...], after: int) -> float:
    """The launcher gets SIGKILL when so many pushes are applied, and there is a checkpoint."""
    folder.mkdir()
    process, run = runs.start(*command, cwd=folder), folder / "run"

    def there() -> bool:
        assert process.poll() is None, (folder / "screen.txt").read_text()
        ledger = run / "ledger.0.tsv"
        far = ledger.exists() and len(ledger.read_text().splitlines()) > after
        return far and store.newest_whole(run / "checkpoints") is not None

    everybody: list[psutil.Process] = []
    try:
        wait_for(there, 300, "training goes on")
        everybody = runs.family(process.pid)
        process.kill()
        psutil.wait_procs(everybody, timeout=60)
    finally:
        process.kill()
        runs.kill(runs.alive(everybody))
    ended = runs.trainer(*command, "resume=auto", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert len(runs.read(run / "lives.json")) == 2
    return auc(run)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_auc_of_runs_that_go_on_is_within_the_noise_of_seeds(mode: str, tmp_path: Path) -> None:
    whole, again = [], []
    for seed in SEEDS:
        command = (*BASE, *MODES[mode], f"seed={seed}")
        pushes = BATCHES if mode != "geo" else BATCHES // 4
        after = random.Random(f"{mode} {seed}").randint(pushes // 4, 3 * pushes // 2)
        whole.append(undisturbed(tmp_path / f"whole{seed}", command))
        again.append(killed(tmp_path / f"killed{seed}", command, after))
    difference, spread = statistics.mean(again) - statistics.mean(whole), statistics.stdev(whole)
    if FILE in os.environ:
        told = [f"{statistics.mean(them):.4f} ({statistics.stdev(them):.4f})" for them in (whole, again)]
        chance = float(stats.ttest_ind(whole, again, equal_var=False).pvalue)
        with Path(os.environ[FILE]).open("a") as file:
            file.write(f"| {mode} | {len(SEEDS)} | {' | '.join(told)} | {difference:+.4f} | {chance:.2f} |\n")
    assert abs(difference) < MOST * spread, (whole, again)
