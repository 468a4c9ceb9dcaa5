"""A server with few descriptors and a worker of its own, for a test that floods it from another process."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

from tests.strategies.pserver.harness import Bare, Cluster, config
from trainer.host import descriptors
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import Message, Verb, text

DESCRIPTORS = 300


def main() -> None:
    """Say where the server is; when told so, save; when told so, let a second worker come, and push."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    descriptors.keep_reserve()
    folder = Path(sys.argv[1])
    run = config("async", 2, handshake_s=1.0)
    run["plan"]["run_dir"] = str(folder)
    with Cluster(run) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        print(cluster.sockets[0].endpoint, flush=True)
        sys.stdin.readline()
        while cluster.sockets[0].closed_until is None and not descriptors.all_taken():
            time.sleep(0.01)
        print("full", flush=True)
        target = snapshot.begin(folder / "persistables")
        worker.client.wait([worker.client.ask(0, Message(Verb.SAVE, records=[text({"folder": str(target)})]))])
        print("saved", flush=True)
        late = Bare(cluster, 1)
        late.client.wait(late.client.push(late.gradient(np.ones(4), np.array([3]), 1.0, -1.0, 1)))
        print("pushed", flush=True)
        late.close()
        worker.close()


if __name__ == "__main__":
    main()
