"""A server with few descriptors and a worker of its own, for a test that floods it from another process."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.strategies.pserver.harness import Bare, Cluster, config
from trainer.host import descriptors
from trainer.host.notes_board import FolderBoard
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import Message, Verb, text

DESCRIPTORS = 300


def fill(full: list[int]) -> None:
    """Take the descriptors that strangers have left, or given back because their connections were closed."""
    while not descriptors.all_taken():
        with suppress(OSError):  # a stranger was faster
            full.append(os.dup(1))


def taken() -> int:
    """How many descriptors this process has."""
    return len(descriptors.in_reserve(lambda: os.listdir("/proc/self/fd")))


def main() -> None:
    """Say where the server is; when told so, save; when told so, let a second worker come, and push."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    descriptors.keep_reserve()
    folder = Path(sys.argv[1])
    run = config("async", 2, handshake_s=1.0)
    run["plan"]["paths"]["run_dir"] = str(folder)
    with Cluster(run) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        print(cluster.sockets[0].endpoint, flush=True)
        while not (folder / "go").exists():
            time.sleep(0.01)
        full: list[int] = []
        fill(full)
        while cluster.sockets[0].closed_until is None:
            time.sleep(0.01)
        print("full", flush=True)
        target = snapshot.begin(folder / "persistables", 0)
        behind = {"folder": "checkpoints/step-1", "checkpoint": True, "behind": True}
        for asked in ({"folder": str(target)}, behind):
            fill(full)
            worker.client.wait([worker.client.ask(0, Message(Verb.SAVE, records=[text(asked)]))])
        fill(full)
        FolderBoard(folder).set("lost", "of which nobody heard")
        fill(full)
        assert FolderBoard(folder).get("lost") == b"of which nobody heard"
        for number in full:
            os.close(number)
        print("saved", flush=True)
        while taken() > DESCRIPTORS // 2:  # this process is the second worker, too
            time.sleep(0.01)
        late = Bare(cluster, 1)
        late.client.wait(late.client.push(late.gradient(np.ones(4), np.array([3]), 1.0, -1.0, 1)))
        print("pushed", flush=True)
        late.close()
        worker.close()


if __name__ == "__main__":
    main()
