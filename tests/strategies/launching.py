"""Real runs of the suite: configs composed as on the command line, processes started by the real launcher."""

from __future__ import annotations

import atexit
import copy
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tests.pages import write_files
from trainer.cli.commands import plain, typed_keys
from trainer.cli.compose import compose, hydra_app
from trainer.config import schema
from trainer.config.keys import key_of
from trainer.job.check import get_ready
from trainer.job.ready import Ready
from trainer.launch.forkserver import Rendezvous, launch
from trainer.launch.started_process import Role


def vocabulary() -> str:
    """A folder of configs: the suite's own and those of docs/adding.md, whose code can be imported from here on."""
    folder = Path(tempfile.mkdtemp(prefix="trainer-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_files("adding.md", folder)
    shutil.copytree(Path(__file__).with_name("conf"), folder / "mine", dirs_exist_ok=True)
    sys.path.append(str(folder))  # processes from the forkserver get the path of who starts them
    return str(folder / "mine")


VOCABULARY = vocabulary()
BASE = (
    "model=lenet",
    "model.image_size=8",
    "data=tiny",
    "data.global_batch_size=16",
    "seed=3",
    "precision=fp64",
    "optimizer=momentum",
    "optimizer.lr=0.05",
    "optimizer.weight_decay=0.01",
    "scheduler=cosine",
    "scheduler.warmup_steps=3",
    "scheduler.final=0.1",
    "max_steps=20",
    "tracking=none",
    "execution.val_every=0",
    "execution.threads=1",
    "device=cpu",
)

STREAMS = ("strategy=collective", "strategy.comm_streams=2", "strategy.bucket_cap_mb=0.001")
VARIANTS = {
    "sharded_optimizer": ("strategy=sharded", "strategy.shard=optimizer"),
    "streams": STREAMS,
    "hierarchical": (*STREAMS, "strategy.reduce_group=2"),
}
"""Strategies of the suite that are a strategy with an option."""
SERVERS = {1: 1, 2: 2, 3: 1, 4: 3}
"""Servers of the suite's parameter-server runs, by the number of workers."""


@dataclass(frozen=True)
class Case:
    """One run inside a launch: a function of entries.py, what it is called with, and the config's overrides."""

    entry: str
    overrides: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    base: tuple[str, ...] = BASE


@cache
def composed(*typed: str) -> Ready:
    """The checked config and plan of a command line: Hydra's own config of its options, and then of its values."""
    options = [o for o in typed if key_of(o) in schema.GROUPS and "{" not in o]
    config = copy.deepcopy(chosen(*options))
    ConfigLoaderImpl._apply_overrides_to_config([parsed(o) for o in typed if o not in options], config)
    return get_ready(plain(config), typed_keys(typed), "nowhere")


@cache
def chosen(*options: str) -> DictConfig:
    """The config of options, with the values that they have."""
    with hydra_app(VOCABULARY) as app:
        return compose(app, list(options))


@cache
def parsed(override: str) -> Any:
    """As Hydra reads it."""
    return OverridesParser.create().parse_override(override)


def payload(
    strategy: str, workers: int, overrides: tuple[str, ...] = (), base: tuple[str, ...] = BASE
) -> dict[str, Any]:
    """What the parent hands to the workers for so many of them, as plain data, see ``Assignment.of``."""
    servers = (f"launch.servers={SERVERS[workers]}",) if strategy.startswith("pserver") else ()
    option = VARIANTS.get(strategy, (f"strategy={strategy}",))
    ready = composed(*base, *option, f"launch.nproc={workers}", *servers, *overrides)
    return copy.deepcopy(ready.assignment.as_dict())


def selected(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Values of these parameters in the file's tests that are to run: a fixture launches for these alone."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(tuple(call[n] for n in names) for call in calls if call.keys() >= {*names}))


def launched(strategy: str, workers: int, cases: Mapping[str, Case], log_dir: Path) -> dict[str, dict[int, Any]]:
    """Run all cases in one launch; what each role's processes returned."""
    return start(hand_over(strategy, workers, cases), log_dir)


def hand_over(strategy: str, workers: int, cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """The cases as ``each_case`` wants them. Hydra composes in one thread at a time."""
    return [
        {
            "entry": f"tests.strategies.entries:{case.entry}",
            "payload": payload(strategy, workers, case.overrides, case.base),
            "arguments": case.arguments,
        }
        for case in cases.values()
    ]


def start(handed: list[dict[str, Any]], log_dir: Path) -> dict[str, dict[int, Any]]:
    """Start the processes and wait for their end."""
    entry = "tests.strategies.entries:each_case"
    sizes = handed[0]["payload"]["plan"]["topology"]["roles"]
    roles = [Role(name, size, entry, ["cpu"] * size) for name, size in sizes.items()]
    return launch(roles, {"cases": handed}, log_dir, Rendezvous()).of
