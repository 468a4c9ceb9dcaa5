"""How many steps a second servers sustain when workers compute nothing; called by pserver.py.

Each worker sends prepared pushes and pulls through the product's client, and waits for each pull. So all that is left
of a step is what the servers do, and the way of its bytes.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pserver
import torch
from rich.console import Console
from rich.table import Table

from trainer.config.instantiate import locate
from trainer.run_folder.report import Report
from trainer.strategies.pserver.protocol.messages import Message
from trainer.strategies.pserver.server import server
from trainer.strategies.pserver.worker.push import WholePush
from trainer.strategies.pserver.worker.sync import PserverSync
from trainer.strategies.pserver.worker.worker import PserverWorker
from trainer.strategies.seat import Seat
from trainer.worker import train
from trainer.worker.build import build
from trainer.worker.settings import settings

WORKERS = 8
SERVERS = (1, 2, 4)
MODES = ("pserver_sync", "pserver_async")
BATCH = 512
WARM, STEPS = 12, 150
"""Steps of each worker before the steady state, and in it."""
PREPARED = 8
"""Different steps of a worker."""
SAMPLE_S = 0.05


@dataclass
class Rates:
    """One run in its steady state: steps a second of all workers together, CPU milliseconds of a step."""

    steps_per_s: float
    server_ms: float
    worker_ms: float


# --- in the processes -------------------------------------------------------------------------------------------------


def replay(seat: Seat, payload: dict[str, Any]) -> list[tuple[float, float]]:
    """A worker; returns the time and its CPU time after each step."""
    config, plan = payload["assignment"].config, payload["assignment"].plan
    seat = train.seated(seat, config, plan)
    stamps = []
    with settings(config, plan, seat):
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        run = build(config, plan, seat, strategy, Report(None, 10**9))
        steps, in_step = itertools.cycle(prepared(strategy)), isinstance(strategy, PserverSync)
        strategy.meet()
        for done in range(1, WARM + STEPS + 1):
            pushes, ids = next(steps)
            strategy.client.push(pushes)
            pull = strategy.pulls.fetch({1: ids}, dense=True, clock=done if in_step else 0)
            strategy.client.wait(pull.requests)
            stamps.append((time.perf_counter(), time.process_time()))
        run.feed.close()
        strategy.close()
    return stamps


def prepared(strategy: PserverWorker) -> list[tuple[list[Message], np.ndarray]]:
    """Steps of this worker: a push for each server, and the ids of the pull after it."""
    pool, first = pserver.Batches(BATCH).pool, strategy.seat.rank * PREPARED
    dense = [1e-3 * torch.randn(strategy.dense.size(s)) for s in strategy.client.servers]
    found = []
    for number in range(first, first + PREPARED):
        ids = np.unique(pool[number % len(pool)][0]["sparse"].numpy())
        rows = {1: (ids, 1e-3 * torch.randn(len(ids), pserver.COLUMNS))}
        push = WholePush(dense, rows, BATCH, 1, 1, strategy.pulls.versions, [])
        found.append((strategy.encoder.messages(push), ids))
    return found


def serve(seat: Seat, payload: dict[str, Any]) -> list[tuple[float, float]]:
    """A server: the product's; returns the time and its CPU time, sampled while it serves."""
    importlib.import_module("torch._dynamo")  # torch.optim does that when it is first used
    samples: list[tuple[float, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            samples.append((time.perf_counter(), time.process_time()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    server.serve(seat, payload["assignment"])
    over.set()
    sampler.join()
    return samples


# --- in the parent ----------------------------------------------------------------------------------------------------


def rates(workers: list[list[tuple[float, float]]], servers: list[list[tuple[float, float]]]) -> Rates:
    """Of the time in which every worker is in its steady state."""
    begin, end = max(stamps[WARM][0] for stamps in workers), min(stamps[-1][0] for stamps in workers)
    steps = sum(
        bisect.bisect([t for t, _ in stamps], end) - bisect.bisect([t for t, _ in stamps], begin) for stamps in workers
    )
    return Rates(
        steps / (end - begin),
        sum(_used(samples, begin, end) for samples in servers) / steps * 1e3,
        sum(_used(stamps, begin, end) for stamps in workers) / steps * 1e3,
    )


def _used(samples: list[tuple[float, float]], begin: float, end: float) -> float:
    """CPU seconds between two times."""
    times, used = zip(*samples, strict=True)
    return float(np.interp(end, times, used) - np.interp(begin, times, used))


def table(repetitions: int) -> None:
    """All modes on all numbers of servers, in turn; the medians."""
    entries = "pserver_replay:replay", "pserver_replay:serve"
    cases = [pserver.Case(m.removeprefix("pserver_"), m, BATCH, WORKERS, n) for m in MODES for n in SERVERS]
    found: dict[pserver.Case, list[Rates]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            results = pserver.processes(case, entries)
            found[case].append(rates(list(results["worker"].values()), list(results["server"].values())))
    shown = Table(title=f"{WORKERS} workers that compute nothing, batch {BATCH}, medians of {repetitions} repetitions")
    for column in (
        "mode",
        "servers",
        "steps/s",
        "CPU ms per step, servers",
        "each server",
        "steps/s per CPU of a server",
        "CPU ms per step, worker",
    ):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for case, runs in found.items():
        steps, servers, worker = (
            statistics.median(getattr(r, name) for r in runs) for name in ("steps_per_s", "server_ms", "worker_ms")
        )
        shown.add_row(
            case.name,
            str(case.servers),
            f"{steps:,.0f}",
            f"{servers:.2f}",
            f"{servers / case.servers:.2f}",
            f"{1e3 * case.servers / servers:,.0f}",
            f"{worker:.2f}",
        )
    Console(width=140).print(shown)
