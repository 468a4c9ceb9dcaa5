"""Nothing is lost and nothing is counted twice, whatever happens to messages, connections and workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.pserver.harness import Bare, Cluster, Resetting, Sum, Weather, config, impatient, in_threads, push_all
from trainer.strategies.pserver.server import ENDPOINT

PUSHES = 12
SIGN = {"async": -1.0, "ssp": -1.0, "geo": 1.0}


def check(cluster: Cluster, total: Sum) -> None:
    """Every server's parameters are exactly the sum, each push was applied once, and all watermarks are at the end."""
    reader = Bare(cluster, 0)
    try:
        vectors, rows = reader.look(Sum.IDS)
    finally:
        reader.die()
    for vector in vectors:
        np.testing.assert_array_equal(vector, total.dense)
    assert rows == total.rows
    for server in cluster.servers:
        assert server.count["pushes"] == cluster.workers * total.pushes
        assert [m.watermark.done for m in server.members.all] == [total.pushes] * cluster.workers
        assert not any(m.watermark.above for m in server.members.all)


def one_worker(cluster: Cluster, rank: int, total: Sum, sign: float, deaths: list[int], ready: threading.Event) -> None:
    """All pushes of a rank, over several lives."""
    if rank:
        assert ready.wait(30)
    for number, stop in enumerate([*deaths, None]):
        worker = Bare(cluster, rank)
        if rank == 0 and not number:
            worker.begin()
            ready.set()
        try:
            push_all(worker, total, sign, stop)
        finally:
            worker.die()


def sum_of_all(cluster: Cluster, mode: str, seed: int, pushes: int = PUSHES, deaths: bool = True) -> None:
    generator = random.Random(seed)
    total, ready = Sum(seed, cluster.workers, pushes), threading.Event()
    jobs = {}
    for rank in range(cluster.workers):
        ends = sorted(generator.sample(range(1, pushes), generator.randrange(3))) if deaths else []
        jobs[f"worker {rank}"] = partial(one_worker, cluster, rank, total, SIGN[mode], ends, ready)
    in_threads(jobs)
    check(cluster, total)


@pytest.mark.parametrize("mode", ["async", "geo"])
@pytest.mark.parametrize("block", range(10))
def test_sum_is_exact_under_lost_doubled_late_and_reordered_messages_and_restarted_workers(
    monkeypatch: pytest.MonkeyPatch, mode: str, block: int
) -> None:
    seen = dict.fromkeys(("dropped", "doubled", "delayed"), 0)
    for seed in range(10 * block, 10 * block + 10):
        weather = Weather(seed, drop=0.1, double=0.15, delay=0.2)
        workers, servers = 2 + seed % 2, 1 + seed % 3
        with impatient(monkeypatch, weather), Cluster(config(mode, workers, servers, launch_barrier=False)) as cluster:
            sum_of_all(cluster, mode, seed)
        seen = {k: n + weather.counts[k] for k, n in seen.items()}
    assert min(seen.values()) > 50, f"the weather was too good: {seen}"


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_sum_is_exact_when_connections_are_reset(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with impatient(monkeypatch, again_s=0.05), Cluster(config(mode, 2, 2)) as cluster:
        proxies = [Resetting(server.socket.endpoint) for server in cluster.servers]
        for number, proxy in enumerate(proxies):
            cluster.store.set(ENDPOINT.format(number), proxy.endpoint)
        over = threading.Event()

        def storm() -> None:
            generator = random.Random(0)
            while not over.wait(0.15 + 0.3 * generator.random()):
                generator.choice(proxies).reset()

        thread = threading.Thread(target=storm, daemon=True)
        thread.start()
        try:
            sum_of_all(cluster, mode, seed=3, pushes=600, deaths=False)
        finally:
            over.set()
            thread.join(5)
            resets = sum(proxy.resets for proxy in proxies)
            for proxy in proxies:
                proxy.close()
        assert resets > 0


@pytest.mark.parametrize("seed", range(2))
def test_sum_is_exact_when_worker_processes_are_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pushes, generator = 3000, random.Random(seed)
    with impatient(monkeypatch), Cluster(config("async", 2, 2)) as cluster:
        first = Bare(cluster, 0)
        first.begin()
        first.die()
        lives = {"worker 0": partial(_lives, cluster, 0, seed, pushes, generator.random()), "worker 1": partial(_lives, cluster, 1, seed, pushes, generator.random())}  # fmt: skip
        killed = in_threads(lives)
        assert sum(killed.values()) >= 2
        check(cluster, Sum(seed, 2, pushes))


def _lives(cluster: Cluster, rank: int, seed: int, pushes: int, share: float) -> int:
    """Processes of a rank one after the other, killed when they have done a third and about two thirds; how many were."""
    told: dict[str, Any] = {
        "rank": rank, "workers": 2, "seed": seed, "pushes": pushes, "sign": SIGN["async"], "secret": cluster.secret.hex(),
        "endpoints": [s.socket.endpoint for s in cluster.servers],
    }  # fmt: skip
    killed = 0
    for end in (pushes // 3, pushes // 2 + int(share * pushes / 3), None):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.pserver.bare_worker", json.dumps(told)], stdout=subprocess.PIPE, text=True
        )
        try:
            until = time.monotonic() + 50
            mark = cluster.servers[rank % 2].members.all[rank].watermark
            while end is not None and mark.done < end and time.monotonic() < until and process.poll() is None:
                time.sleep(0.001)
            if end is not None:
                os.kill(process.pid, signal.SIGKILL)
            out, _ = process.communicate(timeout=50)
        finally:
            process.kill()
        killed += process.returncode == -signal.SIGKILL
    assert out.split() == ["hello", "done"]
    return killed
