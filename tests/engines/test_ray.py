"""launch=ray on a real Ray of three nodes on this host, two of which have a host each."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.ray_cluster import RayCluster, missing, ray_cluster

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]

TRAIN = ["+recipe=digits_lenet", "tracking=none", "hydra.run.dir=run", "checkpoint.grace_s=10", "strategy.timeout_s=20"]
EPOCHS = "epochs=10"
SLOW = "callbacks=[{_target_: tests.engines.slow.Slow}]"
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="ray") as root, ray_cluster(Path(root), 3) as made:
        yield made


def wait(condition: Callable[[], object], folder: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, said(folder)
        time.sleep(0.2)


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "run" / "model.safetensors").read_bytes()).hexdigest()


def nodes(folder: Path) -> list[int]:
    """The numbers of the nodes with a host of the newest life, without the cluster's first, which cannot be spared."""
    line = [line for line in said(folder).splitlines() if line.startswith("ray: life") and ", on " in line][-1]
    found = [int(address.rpartition(".")[2]) - 21 for address in line.partition(", on ")[2].split(", ")]
    return [number for number in found if number]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of two workers on one host, which Ray has nothing to do with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "trainer", *TRAIN, EPOCHS, "launch.nproc=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder)


def test_two_hosts_of_ray_train_what_two_workers_of_one_host_do(
    ray: RayCluster, undisturbed: str, tmp_path: Path
) -> None:
    assert ray.start(tmp_path, *TRAIN, EPOCHS).wait(PATIENCE_S) == 0, said(tmp_path)
    assert weights(tmp_path) == undisturbed
    assert "ended with exit code 0" in said(tmp_path) and "[Epoch 9]" in said(tmp_path)


@pytest.mark.parametrize("what", ["kill", "drain"])
def test_a_node_that_goes_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    ray: RayCluster, undisturbed: str, tmp_path: Path, what: str
) -> None:
    command = ray.start(tmp_path, *TRAIN, EPOCHS, SLOW)
    wait(lambda: "[Epoch 1]" in said(tmp_path), tmp_path)
    node = nodes(tmp_path)[-1]
    ray.ask(f"{what} {node}")
    try:
        assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    finally:
        ray.ask("add")
    assert "is lost" in said(tmp_path) if what == "kill" else "is draining" in said(tmp_path)
    assert "the hosts are placed again" in said(tmp_path) and node not in nodes(tmp_path)
    assert weights(tmp_path) == undisturbed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_signals_to_the_command_end_the_job_with_a_checkpoint(
    ray: RayCluster, tmp_path: Path, number: int, code: int
) -> None:
    command = ray.start(tmp_path, *TRAIN, "epochs=500")
    wait(lambda: "[Epoch 1]" in said(tmp_path), tmp_path)
    command.send_signal(number)
    assert command.wait(PATIENCE_S) == code, said(tmp_path)
    assert any((tmp_path / "run" / "checkpoints").glob("step-*/COMPLETE")) and "placed again" not in said(tmp_path)
