"""How the queue carries a thousand runs: ``python benchmarks/queued_runs.py``, in less than three minutes.

Fifty processes put runs into one queue at the same time, each run in a transaction of its own. Then ``ps`` is timed, a
turn of the runner, and the list of the API. Last, fifty clients submit over HTTP to a real ``serve``, which composes
and checks each command. Nothing trains: the runs need more cores than any host has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.service.queue import Queue, Submission
from trainer.service.runner import Runner

RUNS, CLIENTS, REPEATS = 1000, 50, 5
CORES = 10_000
"""Cores of a run: no host has so many, so that it waits."""


def submission(folder: Path, number: int) -> Submission:
    """A run as ``submit`` puts it into the queue: with this environment, and a config of usual size."""
    return Submission(
        name="digits_lenet",
        folder=str(folder / f"run{number}"),
        log=str(folder / f"run{number}/engine/log"),
        words=["+recipe=digits_lenet", f"seed={number}"],
        command=[sys.executable],
        started_in=str(folder),
        environment=dict(os.environ),
        config="key: value\n" * 500,
        cores=CORES,
    )


def client(home: Path, first: int, count: int) -> None:
    """Submit runs once the file ``go`` is there."""
    queue = Queue(home)
    (home / f"ready{first}").touch()
    while not (home / "go").exists():
        time.sleep(0.005)
    for number in range(first, first + count):
        queue.add([submission(home, number)])
    queue.close()


def submitted(home: Path) -> float:
    """Let all clients submit at the same time; returns runs per second."""
    home.mkdir()
    each = RUNS // CLIENTS
    command = [sys.executable, __file__, "--client", str(home), "--count", str(each), "--first"]
    clients = [subprocess.Popen([*command, str(place * each)]) for place in range(CLIENTS)]
    while len(list(home.glob("ready*"))) < CLIENTS:
        time.sleep(0.05)
    began = time.perf_counter()
    (home / "go").touch()
    assert [one.wait() for one in clients] == [0] * CLIENTS
    return RUNS / (time.perf_counter() - began)


def seconds(work: Callable[[], object]) -> float:
    """Median time of some work."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def over_http(home: Path) -> tuple[float, float, float]:
    """Start a service; returns the seconds of its list, submissions per second, and the slowest's seconds."""
    command = [sys.executable, "-m", "trainer", "serve", "--port", "0", "--runs", str(home / "submitted")]
    serve = subprocess.Popen(command, env={**os.environ, "TRAINER_HOME": str(home)}, stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        page, token = (serve.stdout.readline().split()[1] for _ in range(2))
        url = page.rstrip("/")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

        def ask(body: object = None) -> bytes:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{url}/api/runs", data, headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                found: bytes = answer.read()
            return found

        def submit(number: int) -> float:
            began = time.perf_counter()
            words = ["+recipe=digits_lenet", f"seed={number}", f"launch.cores={CORES}", "tracking=none"]
            ask({"overrides": words, "key": str(number)})
            return time.perf_counter() - began

        listed = seconds(ask)
        ask({"overrides": ["+recipe=digits_lenet", f"launch.cores={CORES}", "tracking=none"], "key": "first"})
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            slowest = max(clients.map(submit, range(CLIENTS)))
        return listed, CLIENTS / (time.perf_counter() - began), slowest
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait()


def main() -> None:
    """Measure, and print the table of docs/performance.md."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        rate = submitted(home)
        queue = Queue(home)
        assert len(queue.newest(10_000)) == RUNS
        ps = [sys.executable, "-m", "trainer", "ps"]
        environment = {**os.environ, "TRAINER_HOME": str(home)}
        shown = seconds(lambda: subprocess.run(ps, env=environment, check=True, stdout=subprocess.DEVNULL))
        runner = Runner(queue)
        runner.turn()
        idle = seconds(runner.turn)

        def after_a_change() -> None:
            queue.set(1, reason="")
            runner.turn()

        turned = seconds(after_a_change)
        queue.close()
        listed, posted, slowest = over_http(home)
    rows = (
        (f"submissions of {CLIENTS} processes at the same time, {RUNS:,} runs", f"{rate:,.0f}/s"),
        (f"`ps` with {RUNS:,} runs that wait", f"{shown:.2f} s"),
        (f"a turn of the runner after a change, {RUNS:,} runs wait", f"{turned * 1000:.0f} ms"),
        ("a turn of the runner without a change", f"{idle * 1000:.2f} ms"),
        (f"`GET /api/runs` with {RUNS:,} runs that wait", f"{listed:.2f} s"),
        (f"submissions of {CLIENTS} clients over HTTP, each composed and checked", f"{posted:.1f}/s"),
        ("the slowest of these", f"{slowest:.1f} s"),
    )
    print("| the queue | measured |\n|---|---|")
    for what, measured in rows:
        print(f"| {what} | {measured} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", type=Path)
    parser.add_argument("--first", type=int)
    parser.add_argument("--count", type=int)
    asked = parser.parse_args()
    if asked.client:
        client(asked.client, asked.first, asked.count)
    else:
        main()
