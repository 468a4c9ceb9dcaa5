"""Real processes, a bad network, kills and stops: the servers' ledgers show every batch once, at every server.

With ``TRAINER_LEDGERS=FILE`` each run leaves a line there, of which ``python -m tests.faults.ledger_table FILE`` makes
a table.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.faults.ledger_table import leave
from tests.faults.relay import Relay, relaying
from tests.faults.stormy import DOOR, SEED
from tests.ledgers import Lines, lines_of
from tests.pace import wait_for
from tests.runs import alive, family, kill, read, start

EPOCHS, WORKERS = 2, 3
SAMPLES = 1438
BASE = (
    "+recipe=digits_lenet",
    "data.lease_batches=5",
    f"epochs={EPOCHS}",
    "tracking=none",
    "hydra.run.dir=run",
    "execution.threads=1",
    "optimizer.lr=0.001",
    "strategy.ledger=true",
    "strategy.lost_after_s=5",
    "strategy.persistables=false",
    f"launch.workers={WORKERS}",
)
MODES = {
    "async": ("strategy.max_merge_var_num=4", "strategy.send_wait_times=2"),
    "ssp": ("strategy.staleness=1",),
    "geo": ("strategy.k_steps=3",),
    "sync": (),
}
KINDS = (
    ("sync", "static"),
    ("async", "leased"),
    ("ssp", "leased"),
    ("geo", "leased"),
    ("async", "static"),
    ("ssp", "static"),
    ("geo", "static"),
)
TRANSPORTS = ("auto", "tcp", "auto", "ipc", "auto")


@dataclass(frozen=True)
class Disturbance:
    """What happens to a process once so many lines stand in a ledger: it stands still for so long, or is killed.

    Attributes:
        whom: ``worker N`` or ``server N``. seconds: 0: it is killed.
    """

    lines: int
    whom: str
    seconds: float = 0.0


@dataclass
class Disturbed:
    """A run that is disturbed.

    Attributes:
        due: what is still to come. stopped: who stands still, and until when. done: what has happened. everybody:
            processes that were seen.
    """

    run: Path
    pid: int
    due: list[Disturbance]
    stopped: list[tuple[float, psutil.Process]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    everybody: list[psutil.Process] = field(default_factory=list)

    def look(self) -> None:
        """Do what is due."""
        for until, process in [one for one in self.stopped if one[0] <= time.monotonic()]:
            self.stopped.remove((until, process))
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        while self.due and self.lines() > self.due[0].lines:
            self._disturb(self.due.pop(0))

    def lines(self) -> int:
        return max((file.read_bytes().count(b"\n") for file in self.run.glob("ledger.*.tsv")), default=0)

    def _disturb(self, one: Disturbance) -> None:
        """Nothing, if its process is not there: it was lost, or starts again."""
        kind, _, number = one.whom.partition(" ")
        process = self._writing_to(str(self.run / f"{kind}log.{number}"))
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP if one.seconds else signal.SIGKILL)
            self.done[f"{kind} {'stopped' if one.seconds else 'killed'}"] += 1
            if one.seconds:
                self.stopped.append((time.monotonic() + one.seconds, process))

    def _writing_to(self, log: str) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):
            self.everybody = family(self.pid)
        for process in self.everybody:
            with suppress(OSError):
                if str(Path(f"/proc/{process.pid}/fd/1").readlink()) == log:
                    return process
        return None


@dataclass(frozen=True)
class Scenario:
    """A run whose mode, servers and faults follow from a seed.

    Args:
        batch: samples in a batch; the last batch of an epoch of leased work is left out where it is not whole.
    """

    seed: int
    batch: int
    disturbances: int

    @property
    def kind(self) -> tuple[str, str]:
        """Its mode, and how work is handed out."""
        return KINDS[self.seed % len(KINDS)]

    @property
    def transport(self) -> str:
        return TRANSPORTS[self.seed % len(TRANSPORTS)]

    @property
    def servers(self) -> int:
        return random.Random(self.seed).choice((1, 2, 3))

    @property
    def batches(self) -> int:
        """Of leased work: those of all workers; of other work: of each worker, whose part is filled up."""
        if self.kind[1] == "leased":
            return EPOCHS * (SAMPLES // self.batch)
        return EPOCHS * -(-SAMPLES // (self.batch * WORKERS))

    def options(self) -> list[str]:
        mode, work = self.kind
        merges = MODES[mode] if (mode, work) != ("async", "static") else ()  # there a push is a batch
        told = [f"strategy=pserver_{mode}", f"strategy._target_=tests.faults.stormy.{mode.capitalize()}", *merges]
        told += [f"data.work={work}"] * (mode != "sync")
        return [
            *told,
            f"strategy.transport={self.transport}",
            f"launch.servers={self.servers}",
            f"data.batch_size={self.batch}",
        ]

    def due(self) -> list[Disturbance]:
        """One worker is killed, or stops for longer than others wait for its sign of life; others, and servers, stop
        for less."""
        draw = random.Random(self.seed)
        victim, *others = draw.sample(range(WORKERS), WORKERS)
        last = EPOCHS * (SAMPLES // self.batch) // 9
        first = draw.choice((Disturbance(0, f"worker {victim}"), Disturbance(0, f"worker {victim}", 8.0)))
        more = [
            Disturbance(
                0,
                draw.choice((f"worker {others[0]}", f"server {draw.randrange(self.servers)}")),
                draw.choice((0.3, 1.0)),
            )
            for _ in range(self.disturbances - 1)
        ]
        drawn = draw.sample([first, *more], self.disturbances)
        lines = sorted(draw.randint(2, last) for _ in drawn)
        return [Disturbance(after, one.whom, one.seconds) for after, one in zip(lines, drawn, strict=True)]


def one_run(folder: Path, scenario: Scenario, *options: str) -> None:
    """Play it: in the end every server has applied everything, once."""
    with relaying(scenario.seed) as (door, counts):
        process = start(*BASE, *scenario.options(), *options, cwd=folder, **{DOOR: door, SEED: str(scenario.seed)})
        run = folder / "run"
        disturbed = Disturbed(run, process.pid, scenario.due())
        try:

            def over() -> bool:
                disturbed.look()
                return process.poll() is not None

            wait_for(over, 600, "the run ends")
        finally:
            process.kill()
            kill(alive(disturbed.everybody))
        storm = counts()
    screen = (folder / "screen.txt").read_text()
    assert process.returncode == 0, f"{scenario}, {disturbed.done}: {screen[-3000:]}"
    assert read(run / "result.json")["status"] == "done"
    ledgers = [lines_of(run / f"ledger.{server}.tsv") for server in range(scenario.servers)]
    found = leased(ledgers, scenario) if scenario.kind[1] == "leased" else static(ledgers, scenario, _lost(run))
    leave(" ".join(scenario.kind), storm + disturbed.done + found)
    assert not found["twice"] and not found["lost"], f"{scenario}, {disturbed.done}, {storm}: {found}; {folder}"
    assert disturbed.done, f"{scenario}: the run was over before"
    assert all(storm[what] > 0 for what in ("dropped", "doubled", "delayed", "reset")), f"{scenario}: {storm}"


def leased(ledgers: list[Lines], scenario: Scenario) -> Counter[str]:
    """Batches of blocks, those that stand in a ledger twice, and those that are missing in one."""
    told = Counter[str]()
    for lines in ledgers:
        found = Counter(batch for *_, batches in lines for batch in batches)
        told += Counter(batches=len(found), twice=found.total() - len(found), lost=abs(scenario.batches - len(found)))
    return told


def static(ledgers: list[Lines], scenario: Scenario, lost: set[int]) -> Counter[str]:
    """The same, where work is split beforehand: of pushes. Those of workers that were lost may end anywhere."""
    told = Counter[str]()
    for rank in range(WORKERS):
        pushes = [[push for worker, push, _ in lines if worker == rank] for lines in ledgers]
        anywhere = set().union(*pushes)
        # in geo a push is an exchange, and all numbers are of these; in ssp some numbers are of pushes without values
        all_of_them = max(anywhere, default=0) if scenario.kind[0] == "geo" else scenario.batches
        for own in pushes:
            told += Counter(batches=len(set(own)), twice=len(own) - len(set(own)))
            if rank not in lost:
                told += Counter(lost=max(abs(all_of_them - len(set(own))), len(anywhere - {*own})))
    return told


def _lost(run: Path) -> set[int]:
    """Workers that a server has declared lost, and that have not come back."""
    return {int(rank) for file in run.glob("server.*.json") for rank in read(file)["lost"]}


@pytest.mark.all
@pytest.mark.parametrize("seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(7, 10))])
def test_every_batch_stands_once_in_every_ledger(tmp_path: Path, seed: int) -> None:
    more = ["strategy.on_lost_worker=continue"] * (KINDS[seed % len(KINDS)][0] == "sync")
    one_run(tmp_path, Scenario(seed, 20, 2), "execution.val_every=0", "checkpoint=none", *more)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 110))
def test_every_batch_stands_once_in_every_ledger_of_a_hundred_runs(tmp_path: Path, seed: int) -> None:
    one_run(tmp_path, Scenario(seed, 8, 4))


def test_relay_gives_each_way_an_endpoint_of_its_own(tmp_path: Path) -> None:
    """Also where workers ask at the same moment: else one would talk to another one's server."""

    async def asked() -> list[str]:
        relay = Relay(tmp_path, "1")
        ways = await asyncio.gather(*(relay._listen(rank, f"ipc://{tmp_path}/server") for rank in range(5)))
        for one in relay.listening:
            one.close()
        return ways

    assert len({*asyncio.run(asked())}) == 5
