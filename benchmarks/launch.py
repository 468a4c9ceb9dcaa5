"""What a launch costs with many hosts, without a cluster: ``python benchmarks/launch.py``.

Each host is a thread with its own connection to a real store of host 0, and runs the launchers' own code: the
rendezvous, the notes between launchers and the lobby, and the roll call of one worker for each host. A message is one
request to the store. Waiting hosts poll, so messages grow with the seconds that a step takes; so do signs of life,
which have a row of their own. The last columns
are the exponents of N of messages and bytes, from the two largest N: 1 is N, and N log N is 1.18 from 100 to 1,000. All
hosts share this machine's cores, so that the seconds are those of all hosts together.

Then come the plan of 10,000 hosts and a follower of a log of 1 GB.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.errors import Died, RunFailed
from trainer.host.notes_board import SealedBoard
from trainer.launch import lobby
from trainer.launch.engines.contract import ENDED, RUNNING, Handle, State
from trainer.launch.engines.engine_folder import LogReader
from trainer.launch.engines.follow import follow
from trainer.launch.lobby import MARK, TERMS, Guest, Lobby, RunOver
from trainer.launch.meeting_place import open_store
from trainer.launch.other_hosts import POLL_S, OtherHosts
from trainer.launch.rendezvous import Rendezvous, meet
from trainer.strategies import liveness
from trainer.strategies.liveness import RollCall

HOSTS = (10, 100, 1000)
SIGNS_S = 5.0
SECRET = "0123456789abcdef" * 4
TERMS_OF_A_RUN = {f"key{number}": f"value {number}" for number in range(60)}
"""About as many bytes as the terms of a recipe."""
PLAN = ("+recipe=resnet50_random", "plan=true", "data.batches=100000", "data.batch_size=4", "device=cpu")
WIDE = ("launch.nnodes=10000", "launch.nproc=8", "launch.master_addr=10.0.0.1", "launch.secret_file=secret")

Row = tuple[float, float, float]
"""Seconds, messages and bytes."""


class Counted:
    """A store of torch that counts its messages and the bytes of their keys and values.

    Attributes:
        messages, sent: of this connection alone.
        signs: the connections for signs of life.
    """

    def __init__(self, store: Any, all_of_them: list[Counted], signs: list[Counted]) -> None:
        self.store, self.signs = store, signs
        self.messages = self.sent = 0
        all_of_them.append(self)

    def clone(self) -> Counted:
        """The same store with a connection of its own, which the lobby uses for signs of life."""
        return Counted(self.store.clone(), self.signs, self.signs)

    def set(self, key: str, value: str) -> None:
        """Count, and set."""
        self._count(len(key) + len(value))
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Count, and add."""
        self._count(len(key))
        return int(self.store.add(key, amount))

    def get(self, key: str) -> bytes:
        """Get, and count."""
        value = bytes(self.store.get(key))
        self._count(len(key) + len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        """Count, and check."""
        self._count(sum(map(len, keys)))
        return bool(self.store.check(keys))

    def _count(self, sent: int) -> None:
        self.messages += 1
        self.sent += sent


class Shared(Counted):
    """A connection that the threads of a worker share, as a roll call does not: where names are not resolved, many new
    connections of one process wait for each other."""

    def clone(self) -> Shared:
        """This connection itself."""
        return self


class Measured:
    """Runs steps of many hosts at once, and measures each."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self.stores, self.signs, self.rows = hosts, list[Counted](), list[Counted](), dict[str, Row]()
        self.pool = ThreadPoolExecutor(hosts)

    def step(self, name: str, of: Callable[[int], Any]) -> list[Any]:
        """Run a step of all hosts, each in its thread; returns their results."""
        before = self._counts(self.stores)
        began = time.perf_counter()
        results = list(self.pool.map(of, range(self.hosts)))
        passed = time.perf_counter() - began
        self.rows[name] = passed, *self._since(before, self.stores)
        return results

    def signs_of_life(self) -> None:
        """Measure the signs of life of so many seconds, and note those of one second."""
        before, began = self._counts(self.signs), time.perf_counter()
        time.sleep(SIGNS_S)
        passed = time.perf_counter() - began
        messages, sent = self._since(before, self.signs)
        self.rows["signs of life in a second"] = 1.0, messages / passed, sent / passed

    def _since(self, before: tuple[int, int], stores: Sequence[Counted]) -> tuple[int, int]:
        messages, sent = self._counts(stores)
        return messages - before[0], sent - before[1]

    def _counts(self, stores: Sequence[Counted]) -> tuple[int, int]:
        return sum(store.messages for store in stores), sum(store.sent for store in stores)


def fixed(hosts: int) -> dict[str, Row]:
    """A run whose hosts stay: they meet, one of them dies, and another run ends well."""
    measured = Measured(hosts)
    first = Rendezvous(hosts=hosts, secret=SECRET, terms=TERMS_OF_A_RUN, timeout_s=300)
    serving = open_store(first)

    def connect(number: int) -> Counted:
        own = replace(first, number=number, port=serving.port)
        return Counted(open_store(own) if number else serving, measured.stores, measured.signs)

    stores = measured.step("connect", connect)
    secrets = measured.step("meet", lambda number: meet(stores[number], replace(first, number=number)))
    boards = [SealedBoard(store, secret) for store, secret in zip(stores, secrets, strict=True)]

    def others(number: int, part: str) -> OtherHosts:
        return OtherHosts([boards[number].under(part)], replace(first, number=number), [])

    def death(number: int) -> None:
        link = others(number, "death")
        if number == hosts // 2:
            link.end("worker 3 was killed by SIGKILL")
            return
        with suppress(RunFailed):
            while True:
                link.poll()
                time.sleep(POLL_S / 5)
        link.end("another host has ended the run")

    measured.step("a process dies, all end", death)
    measured.step("all are done", lambda number: others(number, "end").leave({}))
    for absent in (hosts // 2, 0):
        _roll_call(measured, [Shared(store.store, measured.stores, measured.signs) for store in stores], absent)
    return measured.rows


def _roll_call(measured: Measured, stores: Sequence[Counted], absent: int) -> None:
    """Measure how all workers but one find out who does not come. They have time, because they share a process."""
    liveness.STORE_S = liveness.NOTED_S = 60.0
    boards = [SealedBoard(store, b"key".ljust(32), f"without {absent}/") for store in stores]
    there = {n: RollCall(board, n, measured.hosts) for n, board in enumerate(boards) if n != absent}
    for roll_call in there.values():
        roll_call.reached = 1
    missing = measured.step(
        f"worker {absent if not absent else 'N / 2'} is missing, all ask who it is",
        lambda number: there[number].missing() if number in there else [absent],
    )
    if missing != [[absent]] * measured.hosts:
        print(f"ATTENTION: {sum(one != [absent] for one in missing)} workers have not found out who is missing")


def elastic(hosts: int) -> dict[str, Row]:
    """A run whose hosts come and go: they gather, a life begins, one falls silent, and the run ends."""
    measured = Measured(hosts)
    first = Rendezvous(hosts=hosts, timeout_s=300)
    serving = open_store(first)
    key = b"lobby".ljust(32)

    def board(number: int) -> SealedBoard:
        store = open_store(replace(first, number=number, port=serving.port)) if number else serving
        return SealedBoard(Counted(store, measured.stores, measured.signs), key, "lobby/")

    leading = board(0)
    lead, waits = Lobby(leading, hosts), threading.Semaphore(0)

    def wait(seconds: float) -> None:
        waits.release()
        time.sleep(seconds)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mark").touch()
        leading.set(TERMS, "{}")
        leading.set(MARK, "mark")
        guests = [Guest(board(number), number, "", hosts, wait) for number in range(1, hosts)]

        def gather(number: int) -> None:
            if number:
                guests[number - 1].come(Path(folder), {})
            else:
                lead.gather(hosts, 300, 0.0)

        measured.step("hosts gather", gather)

    def begin(number: int) -> None:
        if number:
            guests[number - 1].next_life(0)
        else:
            for _ in range(1, hosts):
                waits.acquire()
            lead.begin([*range(hosts)], 1, "step-1")

    measured.step("a life begins", begin)
    measured.signs_of_life()

    def silence(number: int) -> None:
        if number == hosts // 2:
            guests[number - 1]._over.set()
        elif not number:
            with suppress(Died):
                while True:
                    lead.watch(None)
                    time.sleep(POLL_S)

    measured.step(f"one is silent for {lobby.LOST_S:g} s", silence)
    measured.step("host 0 reads all notes once", lambda number: None if number else lead.poll())

    def end(number: int) -> None:
        if not number:
            lead.end("done", "")
        elif number != hosts // 2:
            assert isinstance(guests[number - 1].next_life(1), RunOver)
            guests[number - 1].leave()

    measured.step("host 0 ends the run", end)
    return measured.rows


def table(found: Sequence[tuple[int, dict[str, Row]]]) -> None:
    """Print each step against the number of hosts, with the exponents of messages and bytes."""
    sizes = [size for size, _ in found]
    head = "".join(f"{f'{size:,} hosts: s, messages, MB':>34}" for size in sizes)
    print(f"{'step':<42}{head}   exponents")
    for name in found[0][1]:
        rows = [of[name] for _, of in found]
        cells = "".join(f"{seconds:>13.2f}{messages:>11,.0f}{sent / 1e6:>10.2f}" for seconds, messages, sent in rows)
        print(f"{name:<42}{cells}   {_exponent(sizes, rows, 1)} {_exponent(sizes, rows, 2)}", flush=True)


def _exponent(sizes: Sequence[int], rows: Sequence[Row], which: int) -> str:
    few, many = (row[which] for row in rows[-2:]) if len(rows) > 1 else (0.0, 0.0)
    return f"{math.log(many / few) / math.log(sizes[-1] / sizes[-2]):.2f}" if few and many else "-"


def plan(rounds: int) -> None:
    """Print how long ``plan=true`` takes for 10,000 hosts, and for one, in turn."""
    passed: dict[str, list[float]] = {"one host": [], "10,000 hosts": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").write_text(SECRET)
        Path(folder, "secret").chmod(0o600)
        for _ in range(rounds):
            for name, words in (("one host", PLAN), ("10,000 hosts", (*PLAN, *WIDE))):
                began = time.perf_counter()
                command = [sys.executable, "-m", "trainer", *words]
                subprocess.run(command, cwd=folder, capture_output=True, check=True)
                passed[name].append(time.perf_counter() - began)
    few, many = (statistics.median(seconds) for seconds in passed.values())
    print(f"plan=true of one host {few:.2f} s, of 10,000 hosts {many:.2f} s (median of {rounds})", flush=True)


class Written(Handle):
    """A job that has written its log, and has ended when the log is read."""

    name = cancels = log = "a job"

    def __init__(self, path: Path) -> None:
        self.reader = LogReader(path)

    def state(self) -> State:
        return State(ENDED if self.reader.position else RUNNING)

    def lines(self) -> Iterator[str]:
        return self.reader.lines()

    def signal(self, number: int) -> None:
        """Do nothing: nobody signals this job."""

    def cancel(self) -> None:
        """Do nothing: nobody cancels this job."""


def log(size: int, line: bytes) -> None:
    """Print the time and memory of a follower of a log of this many bytes with such lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        with path.open("wb") as file:
            for _ in range(size // (len(line) * 1000)):
                file.write(line * 1000)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        with open(os.devnull, "w") as out:
            follow(Written(path), out)
        passed = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"a log of {size / 1e9:g} GB, lines end with {line[-1:]!r}: {passed:.1f} s, {grown:.0f} MB more", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--rounds", type=int, default=3, help="of the plan")
    parser.add_argument("--gb", type=float, default=1.0, help="of the log")
    asked = parser.parse_args()
    log(int(asked.gb * 1e9), b"epoch 1/90  batch 100/5004  loss 6.9077  2,345 samples/s\n")
    log(int(asked.gb * 1e9), b"epoch 1/90  batch 100/5004  loss 6.9077  2,345 samples/s\r")
    plan(asked.rounds)
    threading.stack_size(512 * 1024)
    table([(hosts, {**fixed(hosts), **elastic(hosts)}) for hosts in asked.hosts])


if __name__ == "__main__":
    main()
