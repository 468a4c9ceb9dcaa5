"""What the processes of a run need is imported once, by the forkserver: a further worker imports next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment
from trainer.config.run_config import RunConfig
from trainer.config.schema import DataConfig, SchedulerConfig
from trainer.launch import preload

ASK = """
import json, sys
from pathlib import Path
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.forkserver import Forked, Role, launch

if __name__ == "__main__":
    worker = Role("worker", 2, "tests.launch.entries:imported", ["cpu", "cpu"])
    found = launch([worker], json.loads(sys.argv[1]), Path("logs"), Rendezvous(), Forked(json.loads(sys.argv[2])))
    print(json.dumps(found.of["worker"][1]))
"""


def asked(folder: Path, names: list[str], preloaded: list[str]) -> dict[str, list[str]]:
    """What a worker says of these modules, with those preloaded."""
    script = folder / "ask.py"
    script.write_text(ASK)
    command = [sys.executable, str(script), json.dumps(names), json.dumps(preloaded)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr, "the forkserver ends in silence"
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.all
def test_workers_find_imported_what_was_asked_for_and_what_an_optimizer_needs(tmp_path: Path) -> None:
    (tmp_path / "of_the_users.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ValueError('where it is needed, and not in the forkserver')")
    names = ["torch._dynamo", "trainer.launch.forkserver", "of_the_users", "broken", "trainer.strategies.collective"]
    found = asked(tmp_path, names, ["of_the_users", "broken", "no_such_module", "trainer.strategies.collective"])
    assert found["imported"] == [name for name in names if name != "broken"]
    assert found["variable"] == [], "no process sees what was meant for the forkserver"


def test_names_are_those_of_packages_that_came_meanwhile_without_what_the_parent_alone_needs() -> None:
    before = set(sys.modules) - {"trainer.launch.preload", "json", "hydra", "pytest", "torch.nn.modules"}
    came = preload.imported_since(before)
    assert {"pytest", "trainer.launch.preload"} <= set(came), "ours are named whole"
    assert {"json", "hydra", "torch.nn.modules"}.isdisjoint(came), "of others two parts of a name at most"


def test_modules_are_those_of_targets_and_entries() -> None:
    config = RunConfig(
        model={"_target_": "mine.nets:Net"},
        data=DataConfig("mine.data.Source"),
        scheduler=SchedulerConfig("mine.rates.Rate"),
        callbacks=[{"_target_": "mine.calls.Back"}],
        metrics={"own": {"_target_": "mine.kappa.Kappa"}},
    )
    found = preload.modules_of(config, ["trainer.worker.train:train"])
    assert set(found) == {"trainer.worker.train", "mine.nets", "mine.data", "mine.rates", "mine.calls", "mine.kappa"}
