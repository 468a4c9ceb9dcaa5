"""Shared by all tests."""

from __future__ import annotations

import atexit
import gc
import os

WORKER = "PYTEST_XDIST_WORKER" in os.environ
gc.disable()  # until all tests are collected: what is imported and collected is no garbage
if WORKER:  # once all other functions of atexit have run: Python would free a million objects one by one
    atexit.register(os._exit, 0)

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests import composing, scheduling, undrawn, zygote
from trainer.host.engine_tasks import LAUNCHER_VARIABLES

# How long an example takes depends on the machine and on what else it does.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")

# Tests run side by side: a thread of OpenMP that spins at a barrier for another, which has no core, makes a step of 2
# ms one of 300. Set before torch is imported, here and in every process that the tests start; results are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # as in the recorder's process

for name in LAUNCHER_VARIABLES:  # the tests themselves may be a task of srun or of Kubernetes
    os.environ.pop(name, None)

LEFT_OUT = {"all", "long", "kills", "engines"}
FORKS = pytest.StashKey[zygote.Zygote]()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Arithmetic of the testing process on one thread: a second one would only spin against the processes tested."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def composing_once() -> Iterator[None]:
    """Configs of the same options are composed once. Processes that the tests start do without this."""
    with composing.once():
        yield


@pytest.fixture(autouse=True, scope="session")
def undrawn_runs() -> Iterator[pytest.MonkeyPatch]:
    """``trainer.run`` in the testing process draws nothing, as runs that the zygote starts."""
    with pytest.MonkeyPatch.context() as patch:
        undrawn.nothing_is_drawn(patch)
        yield patch


@pytest.fixture(scope="module")
def drawn(undrawn_runs: pytest.MonkeyPatch) -> Iterator[None]:
    """For a file that looks at pictures: what is drawn in its own process is drawn."""
    undrawn_runs.undo()
    yield
    undrawn.nothing_is_drawn(undrawn_runs)


@pytest.fixture(scope="session")
def warm() -> None:
    """The forkserver of the session, with everything imported once that the tests' processes need."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()


def pytest_configure(config: pytest.Config) -> None:
    """Testing processes side by side share one process that forks; it imports while they collect their tests."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # it collects none
        config.stash[FORKS] = forks = zygote.Zygote()
        os.environ[zygote.PLACE] = forks.place


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--turn 2/4``: of the tests that ``make test`` leaves out, one fourth, another one for each turn from 0 to 3."""
    parser.addoption("--turn", default="0/1", help="K/N: of the tests marked all, the part K of N")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that ``make test`` leaves out; the longest begin first, see ``tests/scheduling.py``."""
    seen: set[str] = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if scheduling.starts_processes(item.nodeid) and not LEFT_OUT & {*item.keywords}:
            item.add_marker("all") if function in seen else seen.add(function)
    turn, turns = map(int, config.getoption("--turn").split("/"))
    left: list[pytest.Item] = []
    chosen: list[pytest.Item] = []
    for item in items:
        in_turn = "all" not in item.keywords or scheduling.turn(item.nodeid, turns) == turn
        (chosen if in_turn else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(chosen, key=lambda item: scheduling.place(item.nodeid))


def pytest_collection_finish() -> None:
    """A million objects live as long as the process: no collection of garbage looks at them again."""
    gc.freeze()
    gc.enable()
    if not WORKER:
        atexit.register(gc.unfreeze)  # else nanobind complains of objects that are left


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.ByLaunch:
    """Tests that share a launch run in one process."""
    return scheduling.ByLaunch(config, log)


# A CI that runs in the background of a shell ignores SIGINT, and so would every process that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
