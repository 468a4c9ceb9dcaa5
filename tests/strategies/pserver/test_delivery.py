"""Nothing is lost and nothing is counted twice, whatever happens to messages, connections and workers."""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runs import ROOT, environment, zygote
from tests.strategies.pserver.harness import Bare, Cluster, Resetting, Sum, config, impatient, in_threads, push_all
from tests.weather import Weather
from tests.zygote import Started
from trainer.strategies.pserver.protocol.messages import ENDPOINT, Message, Verb
from trainer.strategies.pserver.server.members import Watermark
from trainer.strategies.pserver.worker.client import Client

PUSHES = 12
SIGN = {"async": -1.0, "ssp": -1.0, "geo": 1.0, "sync": -1.0}
IN_STEP = ("ssp", "sync")
STALENESS = 2
BLOCKS = {"async": (1, 10), "geo": (1, 10), "ssp": (1, 3), "sync": (1, 3)}
"""Of ten seeds each, in ``make test`` and in ``make test-long``."""


def check(cluster: Cluster, total: Sum, mean: bool = False) -> None:
    """Every server's parameters are exactly the sum (or its mean over the workers), each push was applied once, and all
    watermarks are at the end."""
    share = 1 / cluster.workers if mean else 1.0
    reader = Bare(cluster, 0)
    try:
        vectors, rows = reader.look(Sum.IDS)
    finally:
        reader.die()
    for vector in vectors:
        np.testing.assert_array_equal(vector, total.dense * share)
    assert rows == {i: value * share for i, value in total.rows.items()}
    for server in cluster.servers:
        assert server.count["pushes"] == cluster.workers * total.pushes
        assert [m.watermark.done for m in server.members.all] == [total.pushes] * cluster.workers
        assert not any(m.watermark.above for m in server.members.all)


def one_worker(cluster: Cluster, rank: int, total: Sum, mode: str, deaths: list[int], ready: threading.Event) -> None:
    """All pushes of a rank, over several lives."""
    if rank:
        assert ready.wait(30)
    for number, stop in enumerate([*deaths, None]):
        worker = Bare(cluster, rank)
        if rank == 0 and not number:
            worker.begin()
            ready.set()
        try:
            push_all(worker, total, SIGN[mode], stop, in_step=mode in IN_STEP)
        finally:
            worker.die()


def sum_of_all(cluster: Cluster, mode: str, seed: int, pushes: int = PUSHES, deaths: bool = True) -> None:
    generator = random.Random(seed)
    total, ready = Sum(seed, cluster.workers, pushes), threading.Event()
    jobs = {}
    for rank in range(cluster.workers):
        ends = sorted(generator.sample(range(1, pushes), generator.randrange(3))) if deaths else []
        jobs[f"worker {rank}"] = partial(one_worker, cluster, rank, total, mode, ends, ready)
    in_threads(jobs)
    check(cluster, total, mode == "sync")


@pytest.mark.parametrize(
    ("mode", "block"),
    [
        pytest.param(mode, block, marks=[pytest.mark.long] * (block >= short))
        for mode, (short, count) in BLOCKS.items()
        for block in range(count)
    ],
)
def test_sum_is_exact_under_lost_doubled_late_and_reordered_messages_and_restarted_workers(
    monkeypatch: pytest.MonkeyPatch, mode: str, block: int
) -> None:
    seen = dict.fromkeys(("dropped", "doubled", "delayed"), 0)
    own = {"sync": {}, "ssp": {"launch_barrier": False, "staleness": STALENESS}}.get(mode, {"launch_barrier": False})
    for seed in range(10 * block, 10 * block + 10):
        weather = Weather(seed, drop=0.1, double=0.15, delay=0.2)
        workers, servers = 2 if mode == "sync" else 2 + seed % 2, 1 + seed % 3  # halves are exact, thirds are not
        with impatient(monkeypatch, weather), Cluster(config(mode, workers, servers, **own)) as cluster:
            sum_of_all(cluster, mode, seed)
        seen = {k: n + weather.counts[k] for k, n in seen.items()}
    assert min(seen.values()) > 50, f"the weather was too good: {seen}"


def test_new_life_never_uses_a_number_that_any_server_has_seen() -> None:
    total = Sum(0, 1, 5)
    with Cluster(config("async", 1, 2)) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        for number, servers in ((1, (0, 1)), (3, (0,))):  # 2 was lost on its way, and 3 to server 1
            for server in servers:
                message = total.messages(worker, number - 1, -1.0)[server]
                message.sequence = number
                worker.client.wait([worker.client.ask(server, message)])
        worker.die()
        again = Bare(cluster, 0)
        assert again.client.watermarks == [1, 1]
        for number in (3, 4):  # gradients that are new
            again.client.wait(again.client.push(total.messages(again, number, -1.0)))
        vectors, _ = again.look(Sum.IDS)
        np.testing.assert_array_equal(vectors[0], total.vectors[0, [0, 2, 3, 4]].sum(0))
        np.testing.assert_array_equal(vectors[1], total.vectors[0, [0, 3, 4]].sum(0))
        again.die()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("mode", ["async", "ssp", "geo"])
def test_sum_is_exact_when_connections_are_reset(monkeypatch: pytest.MonkeyPatch, mode: str, seed: int) -> None:
    own = {"staleness": STALENESS} if mode == "ssp" else {}
    with impatient(monkeypatch, again_s=0.05), Cluster(config(mode, 2, 2, **own)) as cluster:
        proxies = [Resetting(socket.endpoint) for socket in cluster.sockets]
        for number, proxy in enumerate(proxies):
            cluster.store.set(ENDPOINT.format(number), proxy.endpoint)
        over = threading.Event()

        def storm() -> None:
            generator = random.Random(seed)
            while not over.wait(0.15 + 0.3 * generator.random()):
                generator.choice(proxies).reset()

        thread = threading.Thread(target=storm, daemon=True)
        thread.start()
        try:
            sum_of_all(cluster, mode, seed, pushes=100 if mode in IN_STEP else 400, deaths=False)
        finally:
            over.set()
            thread.join(5)
            resets = sum(proxy.resets for proxy in proxies)
            for proxy in proxies:
                proxy.close()
        assert resets > 0


@pytest.mark.parametrize(("seed", "mode"), [(0, "async"), pytest.param(1, "geo", marks=pytest.mark.long)])
def test_sum_is_exact_when_worker_processes_are_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, seed: int, mode: str
) -> None:
    pushes, generator = 600, random.Random(seed)
    zygote()  # not by two threads at once
    with impatient(monkeypatch), Cluster(config(mode, 2, 2)) as cluster:
        first = Bare(cluster, 0)
        first.begin()
        first.die()
        lives = {
            "worker 0": partial(_lives, cluster, 0, mode, seed, pushes, generator.random()),
            "worker 1": partial(_lives, cluster, 1, mode, seed, pushes, generator.random()),
        }
        killed = in_threads(lives)
        assert sum(killed.values()) >= 2
        check(cluster, Sum(seed, 2, pushes))


def _lives(cluster: Cluster, rank: int, mode: str, seed: int, pushes: int, share: float) -> int:
    """Processes of a rank one after the other, killed when they have done a third and about two thirds; how many
    were."""
    told: dict[str, Any] = {
        "rank": rank,
        "workers": 2,
        "seed": seed,
        "pushes": pushes,
        "sign": SIGN[mode],
        "secret": cluster.secret.hex(),
        "endpoints": [s.endpoint for s in cluster.sockets],
    }
    killed = 0
    for end in (pushes // 3, pushes // 2 + int(share * pushes / 3), None):
        with tempfile.TemporaryFile("w+") as out:
            worker = "tests.strategies.pserver.bare_worker"
            process = zygote().start(
                [json.dumps(told)], ROOT, environment(), out.fileno(), sys.__stderr__.fileno(), worker
            )
            _end(process, cluster.servers[rank % 2].members.all[rank].watermark, end)
            out.seek(0)
            said = out.read().split()
        killed += process.returncode == -signal.SIGKILL
    assert said == ["hello", "done"]
    return killed


def _end(process: Started, mark: Watermark, end: int | None) -> None:
    """Kill the process when so many pushes are done, or wait for its end."""
    until = time.monotonic() + 500
    try:
        while end is not None and mark.done < end and time.monotonic() < until and process.poll() is None:
            time.sleep(0.001)
        if end is not None:
            process.kill()
        process.wait(500)
    finally:
        process.kill()


def sendings_of_a_request(room_at: float, seconds: int) -> list[float]:
    """When a request that nobody answers is sent, where there is no room for it before that time."""
    now, sendings = [0.0], list[float]()
    client = Client.__new__(Client)
    client.rank, client.number, client.most_bytes, client.incarnations, client.under_way = 0, 0, 100, [1], {}
    client.names = ["server 0"]

    def send(server: int, frames: Any) -> bool:
        sendings.extend([now[0]] * (now[0] >= room_at))
        return now[0] >= room_at

    client.connections = SimpleNamespace(now=lambda: now[0], send=send)  # type: ignore[assignment]
    client.ask(0, Message(Verb.PULL))
    for _ in range(10 * seconds):
        now[0] += 0.1
        client._send_again()
    return sendings


def test_request_lost_many_times_in_a_row_is_still_sent_again_soon() -> None:
    sendings = sendings_of_a_request(room_at=0.0, seconds=100)
    waits = np.diff(sendings)
    np.testing.assert_allclose(waits[:5], [2, 4, 8, 16, 16], atol=0.2)
    assert waits.max() < 16.2 and len(sendings) == 1 + 3 + 5


def test_request_without_room_goes_as_soon_as_there_is_some() -> None:
    np.testing.assert_allclose(sendings_of_a_request(room_at=30.0, seconds=40), [30, 32, 36], atol=0.4)
