"""Several hosts, each a launcher of its own on the loopback, whose folder is shared: they save together, and end together."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.pace import wait_for
from tests.runs import alive, family, points, read, start, trainer
from tests.zygote import Started
from trainer.host.addresses import LOOPBACK, free_port

BASE = (
    "+recipe=digits_lenet", "data.global_batch_size=32", "limit_train_batches=10", "limit_val_batches=2", "epochs=2", "execution.log_every=1",
    "execution.threads=1", "precision=fp64", "device=cpu", "tracking=none", "checkpoint.every_epochs=null", "checkpoint.background=false",
    "checkpoint.grace_s=200",
)  # fmt: skip
GATE = "callbacks=[{{_target_:tests.faults.gate.Gate,at:{},until:go{}}}]"


@dataclass
class Loopback:
    """Launchers that are hosts of one run, each with a screen of its own."""

    folder: Path
    options: Sequence[str]
    port: int = field(default_factory=lambda: free_port(LOOPBACK))
    screens: dict[int, Path] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run's folder, which all hosts share."""
        return self.folder / "run"

    def start(self, number: int, *more: str) -> Started:
        """Start a host's command; again, where it has been started before."""
        at = self.folder / f"at{number}.{len(self.started)}"
        at.mkdir()
        self.screens[number] = at / "screen.txt"
        where = (f"launch.node_rank={number}", f"launch.master_addr={LOOPBACK}", f"launch.master_port={self.port}")
        self.started.append(start(*BASE, *self.options, *where, f"hydra.run.dir={self.run}", *more, cwd=at))  # fmt: skip
        return self.started[-1]

    def screen(self, number: int) -> str:
        """What the newest command of that host has shown."""
        return self.screens[number].read_text()

    def at_the_gate(self, update: int) -> bool:
        """Whether the workers have done so many updates."""
        assert all(process.poll() is None for process in self.started[-2:]), self.all_screens()
        return (self.run / "metrics.jsonl").exists() and len(points(self.run, "train/loss")) >= update

    def go(self, which: str = "") -> None:
        """Open the gate."""
        (self.run / f"go{which}").touch()

    def all_screens(self) -> str:
        """What all have shown."""
        return "".join(f"--- {n}\n{path.read_text()}" for n, path in self.screens.items())


@contextlib.contextmanager
def loopback(folder: Path, *options: str) -> Iterator[Loopback]:
    """Hosts; nothing of them is left afterwards."""
    hosts = Loopback(folder, options)
    everybody: list[psutil.Process] = []
    try:
        yield hosts
    finally:
        for process in hosts.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody += family(process.pid) if process.poll() is None else []
            process.kill()
        for other in alive(everybody):
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(p["step"], p["metrics"]["train/loss"]) for p in lines if "train/loss" in p["metrics"]]


def same(found: Sequence[tuple[int, float]], truth: Sequence[tuple[int, float]]) -> bool:
    """Each update once, with the loss of the undisturbed run."""
    return [step for step, _ in found] == [step for step, _ in truth] and [loss for _, loss in found] == pytest.approx([loss for _, loss in truth], rel=1e-9)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Updates and losses of the run by one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = trainer(*BASE, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


@pytest.mark.parametrize(
    ("whom", "number"), [((1,), signal.SIGTERM), ((0,), signal.SIGUSR1), ((0, 1), signal.SIGTERM)], ids=["host 1", "host 0", "all"]
)  # fmt: skip
def test_hosts_that_are_preempted_save_one_checkpoint_together_and_tell_how_to_go_on(
    whom: Sequence[int], number: signal.Signals, tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    with loopback(tmp_path, "launch.nnodes=2", GATE.format(6, "")) as hosts:
        both = [hosts.start(0), hosts.start(1)]
        wait_for(lambda: hosts.at_the_gate(6), 120, "the workers wait")
        for host in whom:
            both[host].send_signal(number)
            wait_for(lambda host=host: f"got {number.name}" in hosts.screen(host), 30, "it says so")
        hosts.go()
        assert [host.wait(120) for host in both] == [75, 75], hosts.all_screens()
        for host, own in ((0, hosts.run), (1, hosts.run / "host.1")):
            assert read(own / "status.json")["state"] == read(own / "result.json")["status"] == "preempted", own
            lines = hosts.screen(host).splitlines()
            assert lines[-2] == "preempted: a checkpoint was saved after update 7"
            assert lines[-1].startswith("resume    python -m trainer +recipe=digits_lenet") and lines[-1].endswith(" resume=auto")  # fmt: skip
            assert f" launch.node_rank={host} " in lines[-1]
        saved = [path.name for path in (hosts.run / "checkpoints").iterdir() if path.is_dir()]
        assert saved == ["step-000000007"], "one checkpoint, of all"
        assert {path.name for path in (hosts.run / "checkpoints" / saved[0]).glob("worker-*")} == {"worker-0.safetensors", "worker-1.safetensors"}  # fmt: skip
        if whom == (1,):
            both = [hosts.start(0, "resume=auto"), hosts.start(1, "resume=auto")]
            assert [host.wait(120) for host in both] == [0, 0], hosts.all_screens()
            assert same(losses(hosts.run), undisturbed)
