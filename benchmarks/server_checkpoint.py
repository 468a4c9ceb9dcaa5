"""What a checkpoint of a parameter server with many rows costs: ``python benchmarks/server_checkpoint.py --rows
10000000``.

One server's table with Adagrad, and pushes of random rows one after the other, as fast as the server takes them. How
long pushes wait when the part is written in turn, and when a copy of the process writes it; how fast the copy is;
``torch.save`` and fsync of the same bytes; and an increment after pushes have changed a part of the rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from trainer.checkpoint import durable_folder
from trainer.checkpoint.streamed import Streamed
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.server.increments import Increments
from trainer.strategies.pserver.server.part_writer import Forked
from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.weights.fresh_rows import RowInit
from trainer.weights.server_files import SINCE, ServerFile, full_name, part_name

AT_ONCE, CALM_S = 4096, 5.0
"""Rows of a push, and how long pushes are timed while nothing is written."""
SMALL, CHECKPOINTS = 20_000, 40
"""Rows and checkpoints for which it is counted how many are full parts."""
LOOK_S = 2.0
"""So often the memory of a copy is counted: the kernel holds the copy up meanwhile."""


def table_of(rows: int, dim: int) -> SparseTable:
    """A table with all its rows."""
    table = SparseTable("t", dim, torch.float32, 0, RowInit(), kernel("adagrad"))
    for first in range(0, rows, 1 << 18):
        table.pull(np.arange(first, min(first + (1 << 18), rows)), clock=1)
    return table


class Pushes:
    """Pushes of random rows, each timed."""

    def __init__(self, table: SparseTable, rows: int, share: float = 1.0) -> None:
        self.table, self.rows, self.draw = table, max(1, int(rows * share)), np.random.default_rng(0)
        self.gradients = torch.ones((AT_ONCE, table.dim))
        self.step = 1

    def one(self) -> float:
        """Its seconds."""
        ids = np.unique(self.draw.integers(0, self.rows, AT_ONCE))
        began = time.perf_counter()
        self.step += 1
        self.table.push(ids, self.gradients[: len(ids)], 0.01, self.step, self.step)
        return time.perf_counter() - began

    def until(self, over: Callable[[], bool]) -> list[float]:
        """Seconds of each, until then."""
        taken = [self.one()]
        while not over():
            taken.append(self.one())
        return taken


class Write:
    """One part after the other, each into a folder of its own."""

    def __init__(self, table: SparseTable, folder: Path) -> None:
        self.table, self.folder, self.writer, self.number = table, folder, Forked(), 0

    def part(self, write: Callable[[Callable[[], None]], None], increment: bool = False) -> Path:
        """Have the part written that the table has now; returns its path."""
        self.number += 1
        target = self.folder / f"step-{self.number}"
        tensors: dict[str, Streamed] = {f"table|t|{name}": one for name, one in self.table.state(increment).items()}
        told = {"version": self.number, "life": 1} | ({SINCE: self.number - 1} if increment else {})
        write(partial(snapshot.write_part, target, 0, tensors, told))
        return durable_folder.partial_of(target) / part_name(0)


def behind(work: Write, pushes: Pushes) -> tuple[float, float, list[float], int]:
    """Seconds until the server goes on, and until the part is written; those of pushes meanwhile; bytes that the copy
    held for itself."""
    began = time.perf_counter()
    work.part(lambda write: work.writer.begin(write, lambda why: not print(why)))
    stall, held, looked = time.perf_counter() - began, 0, began
    copies = psutil.Process().children()

    def over() -> bool:
        nonlocal held, looked
        if time.perf_counter() - looked > LOOK_S:
            held, looked = max([held, *(_own(copy) for copy in copies)]), time.perf_counter()
        return not work.writer.busy()

    taken = pushes.until(over)
    return stall, time.perf_counter() - began, taken, held


def _own(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def in_turn(work: Write) -> tuple[float, Path]:
    """Seconds in which nothing else is done, and the part."""
    began = time.perf_counter()
    part = work.part(lambda write: write())
    return time.perf_counter() - began, part


def increment(work: Write, pushes: Pushes, full: Path, share: float) -> Increment:
    """An increment after pushes have changed that share of the rows since a full part, which was written just
    before."""
    table = work.table
    table.count_changes()
    pushes.until(lambda: table.since.count > share * len(table))
    size, began = _bytes_of(table.state(increment=True)), time.perf_counter()
    part = work.part(lambda write: work.writer.begin(write, lambda why: not print(why)), increment=True)
    stall = time.perf_counter() - began
    taken = pushes.until(lambda: not work.writer.busy())
    written = time.perf_counter() - began
    os.link(full, part.with_name(full_name(0)))
    both = read(part)
    return Increment(size, stall, max(taken), written, both, read(full))


def read(part: Path) -> float:
    """Seconds until all rows of a part are in memory."""
    began = time.perf_counter()
    ServerFile(0, part)["table|t|rows"].clone()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Increment:
    """What was measured of one: bytes, and seconds."""

    size: float
    stall: float
    longest: float
    written: float
    read: float
    read_full: float


def torch_saves(table: SparseTable, scratch: Path) -> float:
    """Seconds of ``torch.save`` and fsync of the same tensors, which are in memory already."""
    tensors = {name: torch.from_numpy(one.whole()) for name, one in table.state().items()}
    began = time.perf_counter()
    with (scratch / "state.pt").open("wb") as out:
        torch.save(tensors, out)
        out.flush()
        os.fsync(out.fileno())
    (scratch / "state.pt").unlink()
    return time.perf_counter() - began


def rhythm(share: float) -> tuple[int, float]:
    """Full parts of all checkpoints, and bytes against those of full parts alone, where that share of the rows changes
    before each one."""
    table, draw, decides, sizes = table_of(SMALL, 16), np.random.default_rng(0), Increments(0, 1, True), []
    full, gradients = _bytes_of(table.state()), torch.ones((int(share * SMALL), 16))
    for number in range(CHECKPOINTS):
        part = table.since.count / len(table)
        if number and decides.pays(part):
            decides.shares.append(part)
            sizes.append(_bytes_of(table.state(increment=True)))
        else:
            decides.shares = [1.0]
            table.count_changes()
            sizes.append(full)
        ids = np.sort(draw.choice(SMALL, len(gradients), replace=False))
        table.push(ids, gradients, 0.01, number + 1, number + 1)
    return sizes.count(full), sum(sizes) / full / CHECKPOINTS


def _bytes_of(state: Mapping[str, Streamed]) -> int:
    return sum(one.nbytes for one in state.values())


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changed", type=float, default=0.1, help="share of the rows that change before an increment")
    told = parser.parse_args()
    torch.set_num_threads(1)
    table, scratch = table_of(told.rows, told.dim), Path(tempfile.mkdtemp(prefix="checkpoints-"))
    size = _bytes_of(table.state())
    pushes, work, shown = Pushes(table, told.rows), Write(table, scratch), Shown(told.rows, size)
    try:
        pushes.until(lambda: pushes.step > 50)
        for _ in range(told.rounds):
            began = time.perf_counter()
            shown.calm += pushes.until(lambda began=began: time.perf_counter() - began > CALM_S)  # type: ignore[misc]
            stall, seconds, taken, held = behind(work, pushes)
            shown.stalls.append(stall)
            shown.written.append(seconds)
            shown.meanwhile.append(taken)
            shown.held.append(held)
            shutil.rmtree(scratch)
            scratch.mkdir()
            seconds, full = in_turn(work)
            shown.turns.append(seconds)
            shown.torch.append(torch_saves(table, scratch))
            shown.increments.append(increment(work, pushes, full, told.changed))
            shutil.rmtree(scratch)
            scratch.mkdir()
        shown.table()
        for share in (0.01, 0.05, 0.1, 0.3, 0.6):
            full_parts, size_of_all = rhythm(share)
            print(
                f"{share:.0%} of the rows change: {full_parts} full parts of {CHECKPOINTS}, {size_of_all:.2f} "
                f"of the bytes"
            )
    finally:
        shutil.rmtree(scratch)


class Shown:
    """What was measured, and the table of it."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.calm: list[float] = []
        self.stalls: list[float] = []
        self.written: list[float] = []
        self.turns: list[float] = []
        self.torch: list[float] = []
        self.held: list[int] = []
        self.increments: list[Increment] = []
        self.meanwhile: list[list[float]] = []

    def table(self) -> None:
        """Print it."""
        median, size = statistics.median, self.size / 1e9
        table = Table("what", "measured", title=f"{self.rows:,} rows, {size:.2f} GB, medians of {len(self.stalls)}")
        table.add_row("a push of 4096 rows while nothing is written", _times(self.calm))
        for taken in self.meanwhile[:1]:
            table.add_row("a push while a copy writes (first round)", _times(taken))
        longest = median([max(taken) for taken in self.meanwhile])
        table.add_row("pushes wait for the copy to be made", f"{median(self.stalls):.3f} s")
        table.add_row("longest push while it writes", f"{longest:.3f} s")
        table.add_row("pushes wait when the part is written in turn", f"{median(self.turns):.2f} s")
        written = median(self.written)
        table.add_row(
            "the part is on the disk after",
            f"{written:.2f} s: {size / written:.2f} GB/s, {self.rows / written / 1e6:.2f} million rows/s",
        )
        table.add_row(
            "torch.save of the same bytes and fsync, nothing else done",
            f"{median(self.torch):.2f} s: {size / median(self.torch):.2f} GB/s",
        )
        table.add_row("pushes done meanwhile", f"{median([len(taken) for taken in self.meanwhile]):.0f}")
        table.add_row("memory of the copy for itself", f"{max(self.held) / 1e9:.2f} GB")
        one = Increment(*(median(column) for column in zip(*map(astuple, self.increments), strict=True)))
        table.add_row("an increment", f"{one.size / 1e9:.2f} GB, on the disk after {one.written:.2f} s")
        table.add_row(
            "pushes wait for its copy to be made; longest push while it writes",
            f"{one.stall:.3f} s; {one.longest:.3f} s",
        )
        table.add_row("all rows are read from both; from a full part", f"{one.read:.2f} s; {one.read_full:.2f} s")
        Console(width=130).print(table)


def _times(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return (
        f"{1e3 * statistics.median(ordered):.2f} ms, one of 100 above {1e3 * ordered[int(0.99 * len(ordered))]:.2f} ms"
    )


if __name__ == "__main__":
    main()
