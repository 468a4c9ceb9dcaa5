"""Half an hour of one run of which a process is killed every 20 seconds, its command typed again whenever it has ended.

``TRAINER_SOAK_S=60`` makes it shorter. With ``TRAINER_SOAK=FILE`` each run leaves a row of a Markdown table there.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.checkpoint.test_identity import check_equal
from tests.faults.kills import VICTIMS
from tests.faults.test_kills import LEASED, MOST, SERVERS, check_tracked, kill_one
from tests.ledgers import applied
from tests.zygote import Started

SECONDS = float(os.environ.get("TRAINER_SOAK_S", "1800"))
EVERY_S = 20.0
"""Between two kills, on average."""
UPDATE_S = 0.1
"""So long an update takes at least while processes are killed. Afterwards the run hurries to its end."""
BATCHES = 36
EPOCHS = 1 + round(SECONDS / UPDATE_S / BATCHES)
"""More than a run that nobody kills does in this time."""
HURRY = "hurry"
BASE = (
    "+recipe=digits_lenet",
    "data.batch_size=16",
    f"limit_train_batches={BATCHES}",
    "limit_val_batches=3",
    "execution.log_every=5",
    f"epochs={EPOCHS}",
    "execution.threads=1",
    "checkpoint.every_steps=50",
    "hydra.run.dir=run",
    "launch.nproc=2",
    f"callbacks=[{{_target_:tests.faults.gate.Slow,seconds:{UPDATE_S},until:{HURRY}}}]",
)
STRATEGIES = {
    "collective, tracked": ("tracking.log_model=false", "ema.decay=0.9"),
    "pserver_sync": ("strategy=pserver_sync", *SERVERS),
    "pserver_async": ("strategy=pserver_async", *LEASED),
}
FILE = "TRAINER_SOAK"


class Soaked:
    """A run whose command is typed again and again.

    Attributes:
        commands: how often. screens: what each has printed. killed: how many processes, by role. seen: all that were
            killed with.
    """

    def __init__(self, folder: Path, strategy: str) -> None:
        self.folder, self.command = folder, (*BASE, *STRATEGIES[strategy])
        self.chance = random.Random(strategy)
        self.commands, self.killed, self.seen = 0, Counter[str](), set[psutil.Process]()
        self.screens: list[str] = []

    def kill_for(self, seconds: float) -> None:
        """Every now and then kill a process, of those that there are at that moment."""
        until, process = time.monotonic() + seconds, self._typed()
        while time.monotonic() < until:
            process = self._kept_up(process, min(until, time.monotonic() + self.chance.expovariate(1 / EVERY_S)))
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen |= set(runs.family(process.pid))
                    self.killed[kill_one(process.pid, self.chance)] += 1
        (self.folder / "run" / HURRY).touch()
        for _ in range(MOST):
            if process.wait(1200) == 0:
                break
            process = self._typed()
        self._keep_screen()
        assert process.poll() == 0, self.screens[-1][-3000:]

    def _kept_up(self, process: Started, until: float) -> Started:
        """Until then, whenever the command has ended, type it again."""
        while time.monotonic() < until:
            if process.poll() is not None:
                assert process.poll() != 0, "the run has ended while processes were killed"
                process = self._typed()
            time.sleep(0.05)
        return process

    def _keep_screen(self) -> None:
        self.screens.append((self.folder / "screen.txt").read_text())
        (self.folder / f"screen.{self.commands}.txt").write_text(self.screens[-1])

    def _typed(self) -> Started:
        if self.commands:
            self._keep_screen()
        self.commands += 1
        return runs.start(*self.command, "resume=auto", cwd=self.folder)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 1800)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_killed_for_half_an_hour(strategy: str, tmp_path: Path) -> None:
    soaked = Soaked(tmp_path, strategy)
    soaked.kill_for(SECONDS)
    run = tmp_path / "run"
    psutil.wait_procs(soaked.seen, timeout=60)  # who sends the last points to MLflow ends after the command
    assert not (left := runs.alive(list(soaked.seen))), [(one.pid, one.cmdline()) for one in left]
    if "async" in strategy:
        check_ledgers(run)
    else:
        check_equal(undisturbed(tmp_path, strategy), run)
    if "tracked" in strategy:
        check_tracked(tmp_path)
    assert len(list((run / "checkpoints").glob("step-*"))) <= 4, "older ones are removed"
    if FILE in os.environ:
        leave_row(strategy, soaked, runs.read(run / "result.json"))


def undisturbed(folder: Path, strategy: str) -> Path:
    """The run folder of the same command that nobody kills."""
    whole = folder / "undisturbed"
    (whole / "run").mkdir(parents=True)
    (whole / "run" / HURRY).touch()
    ended = runs.trainer(*BASE, *STRATEGIES[strategy], "tracking=none", cwd=whole)
    assert ended.returncode == 0, ended.stderr
    return whole / "run"


def check_ledgers(run: Path) -> None:
    """Every server has every batch once."""
    for server in range(2):
        found = applied(run / f"ledger.{server}.tsv")
        assert sum(found.values()) == len(found) == EPOCHS * 2 * BATCHES, (server, found.most_common(3))


def leave_row(strategy: str, soaked: Soaked, told: dict[str, Any]) -> None:
    """Strategy, minutes, updates, kills by role, then what the run tells of itself and how often the command was typed
    again."""
    back = len(told["returned"])
    again = [str(n) for n in (back, told["restarts"] - back, told["lost_updates"])]
    killed = [str(soaked.killed[victim]) for victim in VICTIMS]
    cells = [strategy, f"{SECONDS / 60:g}", str(EPOCHS * BATCHES), *killed, str(soaked.commands - 1), *again]
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"| {' | '.join(cells)} |\n")
