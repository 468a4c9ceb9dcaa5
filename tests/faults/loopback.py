"""Hosts on the loopback: each is a launcher of its own. They share the run's folder, or (``apart``) only an address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.ports import ports
from tests.runs import alive, family, kill, points, start
from tests.zygote import Started
from trainer.host.addresses import LOOPBACK

BASE = (
    "+recipe=digits_lenet",
    "data.global_batch_size=32",
    "limit_train_batches=10",
    "limit_val_batches=2",
    "epochs=2",
    "execution.log_every=1",
    "execution.threads=1",
    "precision=fp64",
    "device=cpu",
    "tracking=none",
    "checkpoint.every_epochs=null",
    "checkpoint.background=false",
    "checkpoint.grace_s=200",
)
GATE = "callbacks=[{{_target_:tests.faults.gate.Gate,at:{},until:go{}}}]"


@dataclass
class Loopback:
    """Launchers that are hosts of one run, each with a screen of its own."""

    folder: Path
    options: Sequence[str]
    port: int = field(default_factory=lambda: ports(1)[0])
    screens: dict[int, Path] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    apart: bool = False

    @property
    def run(self) -> Path:
        """The run's folder of host 0, which all hosts share unless they are apart."""
        return self.folder / "run"

    def folder_of(self, number: int) -> Path:
        """The run's folder as that host has it."""
        return self.folder / f"run.{number}" if self.apart and number else self.run

    def start(self, number: int, *more: str) -> Started:
        """Start a host's command; again, where it has been started before."""
        at = self.folder / f"at{number}.{len(self.started)}"
        at.mkdir()
        self.screens[number] = at / "screen.txt"
        where = (f"launch.node_rank={number}", f"launch.master_addr={LOOPBACK}", f"launch.master_port={self.port}")
        where = (*where, f"hydra.run.dir={self.folder_of(number)}")
        variables = {"TRAINER_COPIES": f"file://{self.folder}/store"} if self.apart else {}
        self.started.append(start(*BASE, *self.options, *where, *more, cwd=at, **variables))
        return self.started[-1]

    def screen(self, number: int) -> str:
        """What the newest command of that host has shown."""
        return self.screens[number].read_text()

    def at_the_gate(self, update: int) -> bool:
        """Whether the workers have done so many updates."""
        assert all((process.poll() or 0) <= 0 for process in self.started), self.all_screens()
        return (self.run / "metrics.jsonl").exists() and len(points(self.run, "train/loss")) >= update

    def go(self, which: str = "") -> None:
        """Open the gate."""
        for number in self.screens:
            (self.folder_of(number) / f"go{which}").touch()

    def all_screens(self) -> str:
        """What all have shown."""
        return "".join(f"--- {n}\n{path.read_text()}" for n, path in self.screens.items())


@contextlib.contextmanager
def loopback(folder: Path, *options: str, apart: bool = False) -> Iterator[Loopback]:
    """Hosts; nothing of them is left afterwards."""
    hosts = Loopback(folder, options, apart=apart)
    everybody: list[psutil.Process] = []
    try:
        yield hosts
    finally:
        for process in hosts.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody += family(process.pid) if process.poll() is None else []
            process.kill()
        kill(alive(everybody))


def same(found: Sequence[tuple[int, float]], truth: Sequence[tuple[int, float]]) -> bool:
    """Each update once, with the loss of the undisturbed run."""
    return [step for step, _ in found] == [step for step, _ in truth] and [loss for _, loss in found] == pytest.approx(
        [loss for _, loss in truth], rel=1e-9
    )
