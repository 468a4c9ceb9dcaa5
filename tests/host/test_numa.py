"""NUMA nodes are read from the kernel's files, and a process with all its threads is bound to one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.host.pretended_driver import Card, Library, install
from trainer.host import hardware, numa, nvml
from trainer.host.numa import Nodes

CORES = os.sched_getaffinity(0)


def machine(root: Path, cores: dict[int, str], gpus: dict[str, str]) -> Path:
    for node, text in cores.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    for bus_id, node in gpus.items():
        folder = root / "bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    return root


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    gpus = {"0000:17:00.0": "0", "0001:b1:00.0": "1", "0000:99:00.0": "-1"}
    root = machine(tmp_path, {0: "0-3,8", 1: "4-7,9-10", 10: "11", 2: ""}, gpus)
    asked = ["00000000:17:00.0", "00000001:B1:00.0", "00000000:99:00.0", "00000000:01:00.0", "", "odd"]
    found = numa.read(asked, range(11), root)
    assert found == Nodes({0: (0, 1, 2, 3, 8), 1: (4, 5, 6, 7, 9, 10)}, (0, 1, -1, -1, -1, -1))
    assert numa.read([], [5], root).cores == {1: (5,)}, "what a job's own cores leave of it"
    assert numa.read(["00000000:17:00.0"], [0], tmp_path / "none") == Nodes({}, (-1,))


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_all_threads_are_bound_and_set_free_again() -> None:
    one, there, done = min(CORES), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (there.set(), done.wait(60)))
    thread.start()
    there.wait(60)
    assert thread.native_id is not None
    with numa.bound([one]):
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == {one}
        child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == str({one})
    assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == CORES
    done.set()
    thread.join()


def test_the_driver_says_where_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = (Card("MIG 1g", "MIG-d"),)
    cards = [
        Card("H100", "GPU-a", bus=0x17),
        Card("H100", "GPU-b", bus=0xB1, slices=slices),
        Card("H100", "GPU-c", bus=None),
    ]
    install(monkeypatch, Library(cards))
    assert nvml.bus_ids(["MIG-d", "GPU-a", "GPU-c", ""]) == ["00000000:B1:00.0", "00000000:17:00.0", "", ""]
    install(monkeypatch, Library(cards[:1]))
    found = hardware.numa_nodes()
    assert found is not None and len(found.gpus) == 1
    install(monkeypatch, None)
    assert hardware.numa_nodes() is None and nvml.bus_ids(["GPU-a"]) == [""]
