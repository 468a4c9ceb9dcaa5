"""A worker process that pushes its numbers to servers of another process, to be killed: rank, endpoints, secret,
seed."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch.distributed as dist

from tests.strategies.pserver.harness import Bare, Sum, push_all
from trainer.host.notes_board import SealedBoard
from trainer.strategies.pserver.protocol.messages import ENDPOINT
from trainer.strategies.seat import Address, Others, Seat


def main() -> None:
    """Say hello, go on from where the life before ended, say ``done``, and leave without a word."""
    told = json.loads(sys.argv[1])
    store = SealedBoard(dist.HashStore(), bytes.fromhex(told["secret"]))
    for number, endpoint in enumerate(told["endpoints"]):
        store.set(ENDPOINT.format(number), endpoint)
    size = len(told["endpoints"])
    address, others = Address(bytes.fromhex(told["secret"])), Others(servers=size)
    seat = Seat("worker", told["rank"], told["workers"], 0, 1, "cpu", store, address=address, others=others)
    run = {"config": {"strategy": {"timeout_s": 20.0, "lost_after_s": 60.0}}}
    worker = Bare(SimpleNamespace(run=run, size=size, seat=lambda *_: seat), told["rank"])
    print("hello", flush=True)
    push_all(worker, Sum(told["seed"], told["workers"], told["pushes"]), told["sign"])
    print("done", flush=True)
    worker.die()


if __name__ == "__main__":
    main()
