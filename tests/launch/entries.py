"""What the processes of the launcher's tests do; each function is an entry called with (seat, payload)."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.pace import wait_for
from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.feed import Feed
from trainer.data.placement import Placement
from trainer.data.reader import Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.source import Splits
from trainer.errors import RunFailed, UserError
from trainer.host.pulse import Pulse
from trainer.strategies.seat import Seat

LONG_S = 300


@dataclass(frozen=True)
class Babble:
    """What ``babbles`` is handed: what it must not say, and its log."""

    secrets: tuple[str, str]
    log: str


def babbles(seat: Seat, told: Babble) -> str:
    """Prints what it should keep to itself, on both streams, and returns its log as it is then."""
    secret, other = told.secrets
    print(secret, "and", other, "here")
    print("\x1b[2J\u202e")
    try:
        raise ValueError(secret)
    except ValueError as error:
        print(f"ValueError: {error}", file=sys.stderr)
    print("no newline", json.dumps(secret)[1:-1], end="", flush=True)
    return Path(told.log).read_text()


def tells(seat: Seat, payload: Any) -> dict[str, Any]:
    """Says something on both streams, from Python and from below it, and returns where it sits."""
    print(f"{payload} stdout of {seat.role} {seat.rank}")
    print(f"{payload} stderr of {seat.role} {seat.rank}", file=sys.stderr)
    os.system(f"echo {payload} a child of {seat.role} {seat.rank}; echo {payload} its stderr >&2")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    seat.store.set(f"{seat.role} {seat.rank}", "hello")
    seat.store.wait([f"worker {rank}" for rank in range(2)])
    return {
        "seat": (seat.role, seat.rank, seat.size, seat.local_rank, seat.device),
        "env": [os.environ[n] for n in names],
    }


def holds_up(seat: Seat, payload: Any) -> None:
    """Worker 0 waits for worker 1, which hangs when its launcher has been told that worker 0 does nothing."""
    pulse = Pulse(seat.life.pulse)
    pulse.update(3 + (seat.rank == 0))
    told = seat.store.clone()
    while seat.rank == 1 and not told.check(["silent/0"]):
        pulse.sign()
        time.sleep(0.05)
    seat.store.wait(["never"], datetime.timedelta(seconds=LONG_S))


def sums(seat: Seat, payload: Any) -> tuple[float, str, str]:
    """The sum of all ranks, by Gloo; and what the environment says."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", seat.group_store), rank=seat.rank, world_size=seat.size
    )
    ranks = torch.tensor([float(seat.rank)])
    dist.all_reduce(ranks)
    dist.destroy_process_group()
    print(f"rank {seat.rank} has summed")
    return ranks.item(), os.environ["RANK"], os.environ["LOCAL_RANK"]


def raises(seat: Seat, payload: Any) -> None:
    """Worker 1 fails in a function of its own; the others would work for long."""
    if seat.rank == 1:
        print("worker 1 was here")
        _read_batch(3)
    time.sleep(LONG_S)


def raises_and_stays(seat: Seat, payload: Any) -> None:
    """Worker 1 fails, but a thread keeps its process from ending."""
    if seat.rank == 1:
        threading.Thread(target=time.sleep, args=(LONG_S,)).start()
        _read_batch(4)
    time.sleep(LONG_S)


def _read_batch(number: int) -> None:
    raise ValueError(f"batch {number} is broken")


def fails_in_words(seat: Seat, payload: str) -> None:
    """Worker 1 fails with an error made for users."""
    if seat.rank == 1:
        try:
            raise KeyError("inner")
        except KeyError as error:
            if payload == "RunFailed":
                raise RunFailed("the disk is full\n  and a second line") from error
            raise UserError("data.root=x", "is empty", "data.root=y") from error
    time.sleep(LONG_S)


def echoes(seat: Seat, payload: Any) -> None:
    """Worker 1 fails, and worker 0 fails of that within the same second, before the launcher has looked."""

    class Cause(ValueError):
        """The other one knows of it when it is put into words: when it was is noted by then."""

        def __str__(self) -> str:
            seat.store.set("failing", "")
            return "the cause"

    if seat.rank == 1:
        time.sleep(1 - time.time() % 1 + 0.1)  # the start of a second by the clock
        raise Cause
    seat.store.wait(["failing"])
    time.sleep(0.03)
    raise ValueError("an echo")


def killed(seat: Seat, payload: int) -> None:
    """Worker 1 is killed by a signal while the others wait for it in a collective."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", seat.group_store), rank=seat.rank, world_size=seat.size
    )
    print(f"worker {seat.rank} trains")
    if seat.rank == 1:
        os.kill(os.getpid(), payload)
    dist.all_reduce(torch.zeros(1))
    raise AssertionError("it must not get here")


def crashes(seat: Seat, payload: Any) -> None:
    """Worker 1 reads from address 0."""
    if seat.rank == 1:
        ctypes.string_at(0)
    time.sleep(LONG_S)


def aborts(seat: Seat, payload: Any) -> None:
    """Worker 1 ends as C++ ends a process at an exception that nobody catches, deep in calls and with other threads."""

    def inside(depth: int) -> None:
        if depth:
            inside(depth - 1)
        os.write(
            2,
            (
                b"terminate called after throwing an instance of 'gloo::IoException'\n  what():  "
                b"Connection reset by peer\n"
            ),
        )
        os.abort()

    if seat.rank == 1:
        for _ in range(5):
            threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True).start()
        inside(40)
    time.sleep(LONG_S)


def exits(seat: Seat, payload: int) -> None:
    """Worker 1 ends without a word."""
    if seat.rank == 1:
        print("the last words", flush=True)
        os._exit(payload)
    time.sleep(LONG_S)


def server_fails(seat: Seat, payload: Any) -> None:
    """The server fails; the workers would wait for it."""
    if seat.role == "server":
        raise ValueError("no memory for the table")
    time.sleep(LONG_S)


def listens(seat: Seat, payload: Any) -> list[tuple[str, str, int]]:
    """In a process group: everything that this process, the launcher and the forkserver listen on."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", seat.group_store), rank=seat.rank, world_size=seat.size
    )
    dist.all_reduce(torch.zeros(1))
    processes = {"worker": psutil.Process(), "launcher": psutil.Process(payload)}
    found = [
        (who, c.laddr.ip, c.laddr.port)
        for who, process in processes.items()
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found


def works_for_long(seat: Seat, payload: dict[str, Any]) -> None:
    """Writes the numbers of its processes into a folder, then works on; each worker has a reading process."""
    if payload["deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    numbers = ArrayDataset(torch.zeros(1000, 1), torch.arange(1000))
    splits = Splits(numbers, numbers)
    place = Placement(splits, torch.device("cpu"), torch.float32, False)
    feed = Feed(
        splits, DistributedBatchSampler(1000, 2), EvaluationSampler(0, 1), place, reading=Reading(num_workers=1)
    )
    next(next(feed.updates(0))[1])
    processes = [psutil.Process(), psutil.Process().parent(), *psutil.Process().children(recursive=True)]
    folder = Path(payload["folder"])
    part = folder / f".{seat.rank}"
    part.write_text(" ".join(str(p.pid) for p in processes))
    part.rename(folder / f"pids.{seat.rank}")
    if payload["fails"] and seat.rank == 1:
        wait_for((folder / "seen").exists, 60, "the parent has seen everybody")
        raise ValueError("enough")
    time.sleep(LONG_S)


def imported(seat: Seat, names: list[str]) -> dict[str, list[str]]:
    """Which of the modules are there before anything is done, and the forkserver's variables that are left."""
    return {
        "imported": [name for name in names if name in sys.modules],
        "variable": [name for name in os.environ if name == "TRAINER_PRELOAD"],
    }


def leaves_early(seat: Seat, payload: int) -> None:
    """Its own code ends the process before the work is done."""
    if seat.rank == 1:
        sys.exit(payload)


def returns_and_stays(seat: Seat, payload: str) -> int:
    """All do their work, with signs of life until their launcher has seen it; a thread keeps the process of worker 1
    from ending."""
    pulse = Pulse(seat.life.pulse)

    def stays() -> None:
        while not Path(payload).exists():
            pulse.sign()
            time.sleep(0.05)
        time.sleep(LONG_S)

    threading.Thread(target=stays, daemon=seat.rank == 0).start()
    pulse.update(3)
    return seat.rank


def stops_its_forkserver(seat: Seat, killed: bool) -> int:
    """Returns the number of the process that tells how this one ends, and that is stopped now."""
    os.kill(os.getppid(), signal.SIGSTOP)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getppid()
