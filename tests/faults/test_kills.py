"""SIGKILL of any process of a run, at any moment: the same command with resume=auto ends as if nothing had happened.

With ``TRAINER_KILLS=FILE`` each run leaves a line there, of which ``python -m tests.faults.kills FILE`` makes a table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.checkpoint.test_identity import check_equal
from tests.faults.kills import FILE, Kill, leave
from tests.faults.test_restarts import sent
from tests.ledgers import applied

BATCHES, EPOCHS = 36, 2
BASE = (
    "+recipe=digits_lenet",
    "data.batch_size=16",
    f"limit_train_batches={BATCHES}",
    "limit_val_batches=3",
    "execution.log_every=5",
    f"epochs={EPOCHS}",
    "execution.threads=1",
    "checkpoint.every_steps=7",
    "hydra.run.dir=run",
)
UNTRACKED = "tracking=none"
TOGETHER = (UNTRACKED, "launch.nproc=2", "ema.decay=0.9")
SERVERS = (UNTRACKED, "launch.nproc=2", "launch.servers=2", "strategy.persistables=false")
LEASED = (*SERVERS, "data.lease_batches=4", "strategy.ledger=true", "optimizer.lr=0.001")
EXACT = {
    "single": (UNTRACKED, "ema.decay=0.9"),
    "a child": (UNTRACKED, "launch=forkserver", "data.num_workers=1", "ema.decay=0.9"),
    "tracked": ("tracking.log_model=false", "execution.log_every=1"),
    "collective": TOGETHER,
    "sharded": (*TOGETHER, "strategy=sharded"),
    "sharded optimizer": (*TOGETHER, "strategy=sharded", "strategy.shard=optimizer"),
    "local_sgd": (*TOGETHER, "strategy=local_sgd", "strategy.k_steps=3"),
    "pserver_sync": ("strategy=pserver_sync", *SERVERS),
}
"""Bit by bit what an undisturbed run is."""
STRATEGIES = EXACT | {
    "pserver_async": ("strategy=pserver_async", *LEASED),
    "pserver_ssp": ("strategy=pserver_ssp", "strategy.staleness=1", *LEASED),
    "pserver_geo": ("strategy=pserver_geo", "strategy.k_steps=3", *LEASED),
}
"""Of the others the ledgers tell that every batch counts once at every server, over all lives."""
MOST = 8
"""Times that a run is started again."""
CI, LONG = 3, 63
"""Kills of each strategy: up to which `make kills` goes on, and in all."""
IN_TESTS = ("pserver_async",)
"""`make test` plays the first kill of this one, and `make kills` the others up to that number."""


def kills() -> Iterator[Any]:
    """Numbers and strategies, each with the mark of who plays it."""
    for number, strategy in itertools.product(range(LONG), STRATEGIES):
        in_tests = number == 0 and strategy in IN_TESTS
        marks = [] if in_tests else [pytest.mark.kills if number < CI else pytest.mark.long]
        yield pytest.param(number, strategy, marks=marks, id=f"{number}-{strategy}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, float]]:
    """The run of a strategy that nobody kills, and its seconds."""
    known: dict[str, tuple[Path, float]] = {}

    def run(strategy: str) -> tuple[Path, float]:
        if not known:  # what is forked is ready from now on
            runs.trainer("--help", cwd=tmp_path_factory.mktemp("ready"))
        if strategy not in known:
            folder, began = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
            ended = runs.trainer(*BASE, *STRATEGIES[strategy], cwd=folder)
            assert ended.returncode == 0, ended.stderr
            known[strategy] = folder / "run", time.monotonic() - began
        return known[strategy]

    return run


@pytest.mark.all
@pytest.mark.parametrize(("number", "strategy"), kills())
def test_a_killed_run_ends_as_if_nothing_had_happened(
    number: int, strategy: str, undisturbed: Callable[[str], tuple[Path, float]], tmp_path: Path
) -> None:
    whole, seconds = undisturbed(strategy)
    chance, began = random.Random(f"{strategy} {number}"), time.monotonic()
    command = (*BASE, *STRATEGIES[strategy])
    process = runs.start(*command, cwd=tmp_path)
    time.sleep(chance.uniform(0.05, 0.95) * seconds)
    victim = ""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # what was to be killed has come to its end meanwhile
            victim = kill_one(process.pid, chance)
        process.wait(300)
    again = 0
    while process.poll() != 0:
        again += 1
        assert again <= MOST, (tmp_path / "screen.txt").read_text()
        process = runs.start(*command, "resume=auto", cwd=tmp_path)
        process.wait(300)
    took, told = time.monotonic() - began, runs.read(tmp_path / "run" / "result.json")
    if strategy in EXACT:
        check_equal(whole, tmp_path / "run")
        if strategy == "tracked":
            check_tracked(tmp_path)
    else:
        for server in range(2):
            found = applied(tmp_path / "run" / f"ledger.{server}.tsv")
            assert sum(found.values()) == len(found) == EPOCHS * 2 * BATCHES, found.most_common(3)
    if FILE in os.environ and victim:
        back = len(told["returned"])
        leave(Kill(strategy, victim, again, told["restarts"] - back, back, told["lost_updates"], took - seconds))


def check_tracked(folder: Path) -> None:
    """MLflow has one run that ended well, with each update's loss once. Where the first command left no checkpoint, the
    next one began another run, and the killed one stays as it is."""
    run_id, lives = runs.read(folder / "run" / "result.json")["run_id"], runs.read(folder / "run" / "lives.json")
    assert sent(folder, run_id) == runs.losses(folder / "run")
    others = {run.info.run_id: run.info.status for run in runs.mlflow_runs(folder)}
    assert others.pop(run_id) == "FINISHED"
    assert not others or (len(lives) == 1 and "FINISHED" not in others.values()), "a run that goes on is the same run"


def kill_one(launcher: int, chance: random.Random) -> str:
    """Kill one process of the run; tells which it was."""
    everybody = runs.family(launcher)
    victim = chance.choice(everybody)
    name = role(victim, launcher)
    victim.kill()
    if victim.pid == launcher:
        psutil.wait_procs(everybody, timeout=60)
        assert not runs.alive(everybody), "who loses the launcher ends"
    return name


def role(process: psutil.Process, launcher: int) -> str:
    """What a process of a run is, by where its output goes."""
    if process.pid == launcher:
        return "launcher"
    try:
        log = Path(f"/proc/{process.pid}/fd/1").readlink().name
    except OSError:
        return "another"
    if log.startswith("pipe:") and os.getsid(process.pid) == process.pid:
        return "tracking"
    return next((name for name in ("worker", "server") if log.startswith(f"{name}log.")), "another")
