"""Real processes, a bad network, kills and stops: the servers' ledgers show every batch once, at every server."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.faults.stormy import NOTES, SEED
from tests.pace import wait_for
from tests.runs import alive, family, kill, read, start

EPOCHS = 2
SAMPLES = 1438
BASE = (
    "+recipe=digits_lenet", "data.lease_batches=5", f"epochs={EPOCHS}", "tracking=none", "hydra.run.dir=run",
    "execution.threads=1", "optimizer.lr=0.001", "strategy.ledger=true", "strategy.transport=tcp", "strategy.lost_after_s=5",
    "strategy.persistables=false",
)  # fmt: skip
MODES = {
    "async": ("strategy.max_merge_var_num=4", "strategy.send_wait_times=2"),
    "ssp": ("strategy.staleness=1",),
    "geo": ("strategy.k_steps=3",),
}


def applied(path: Path) -> Counter[tuple[int, int, int]]:
    """How often each (epoch, block, batch) stands in a ledger."""
    head, *lines = path.read_text().splitlines()
    assert head.split("\t") == ["worker", "push", "epoch", "block", "first", "after_last"]
    found: Counter[tuple[int, int, int]] = Counter()
    for line in lines:
        _, _, *piece = line.split("\t")
        if not any(piece):
            continue  # geo: differences that are exchanged at a meeting
        epoch, block, first, after_last = (int(n) for n in piece)
        found.update((epoch, block, batch) for batch in range(first, after_last))
    return found


def disturb(run: Path, processes: list[psutil.Process], draw: random.Random) -> str:
    """Kill a worker or stop it for a while: longer or shorter than others wait for its sign of life."""
    log = str(run / f"workerlog.{draw.randrange(3)}")
    [worker] = [p for p in processes if p.is_running() and log in _outputs(p)]
    if draw.random() < 0.5:
        worker.send_signal(signal.SIGKILL)
        return "killed"
    worker.send_signal(signal.SIGSTOP)
    time.sleep(draw.choice((0.5, 2.0, 8.0)))
    worker.send_signal(signal.SIGCONT)
    return "stopped"


def _outputs(process: psutil.Process) -> list[str]:
    try:
        return [str(Path(f"/proc/{process.pid}/fd/1").readlink())]
    except OSError:
        return []


def one_run(folder: Path, seed: int, batch: int, *options: str) -> None:
    """A run whose mode, servers and faults follow from a seed.

    Args:
        batch: samples in a batch; the last batch of an epoch is left out where it is not whole.
    """
    draw, batches = random.Random(seed), EPOCHS * (SAMPLES // batch)
    mode = list(MODES)[seed % 3]
    servers = draw.choice((1, 2, 3))
    target = f"strategy._target_=tests.faults.stormy.{mode.capitalize()}"
    process = start(
        *BASE, f"strategy=pserver_{mode}", target, "launch.workers=3", f"launch.servers={servers}", *MODES[mode], f"data.batch_size={batch}", *options,
        cwd=folder, **{SEED: str(seed), NOTES: str(folder)},
    )  # fmt: skip
    run, everybody, lines = folder / "run", [], draw.randint(2, batches // 9)
    try:
        ledger = run / "ledger.0.tsv"

        def trains() -> bool:
            assert process.poll() is None, (folder / "screen.txt").read_text()[-3000:]
            return ledger.exists() and len(ledger.read_text().splitlines()) > lines

        wait_for(trains, 600, "training goes on")
        everybody = family(process.pid)
        what = disturb(run, everybody, draw)
        wait_for(lambda: process.poll() is not None, 600, "the run ends")
    finally:
        process.kill()
        kill(alive(everybody))
    screen = (folder / "screen.txt").read_text()
    assert process.returncode == 0, f"seed {seed}, {mode}, {what}: {screen[-3000:]}"
    assert read(run / "result.json")["status"] == "done"
    for server in range(servers):
        found = applied(run / f"ledger.{server}.tsv")
        assert sum(found.values()) == len(found) == batches, f"seed {seed}, {mode}, {what}: {found.most_common(3)}"  # fmt: skip
    storm = Counter[str]()
    for note in folder.glob("storm.*"):
        storm.update(read(note))
    assert all(storm[what] > 0 for what in ("dropped", "doubled", "delayed", "reset")), f"seed {seed}, {mode}: {storm}"


@pytest.mark.parametrize("seed", range(10))
def test_every_batch_stands_once_in_every_ledger(tmp_path: Path, seed: int) -> None:
    one_run(tmp_path, seed, 20, "execution.val_every=0", "checkpoint=none")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 110))
def test_every_batch_stands_once_in_every_ledger_of_a_hundred_runs(tmp_path: Path, seed: int) -> None:
    one_run(tmp_path, seed, 8)
