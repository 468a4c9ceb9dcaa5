"""``python benchmarks/advice.py [--updates 12]``: how far the predictions of strategy=advise are from what is measured.

It measures short trainings with one and two workers, as strategy=advise does. Then it trains

- with four workers on this host,
- with two workers in two network namespaces, whose link ``tc`` limits (root's privileges are needed; a queue of tbf
  limits the rate, and no latency is added).

The table has both numbers. Other work on the machine makes them differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.cli import advise, compose
from trainer.cli.short_trainings import short
from trainer.job.advice import cost_of
from trainer.planning.cost import Link
from trainer.worker.advice_probe import usual

RUN = ("+recipe=resnet50_flowers_demo", "data.batch_size=16", "execution.threads=1", "precision=fp32", "device=cpu")
ON_ONE_HOST = ("collective", "sharded optimizer", "sharded parameters", "local_sgd k=4")
BETWEEN_HOSTS = ("collective", "local_sgd k=4")
GBIT = (0.1, 1.0, 10.0)
HOSTS = ("advice-0", "advice-1")


def measured(folder: Path, updates: int, *words: str, within: tuple[str, ...] = ()) -> float:
    """Seconds of an update after the first third: the lower quartile, of local_sgd's cycles of 4 updates."""
    common = [*RUN, *short(updates), "execution.log_every=1", "verbosity=quiet", *words]
    if not within:
        alone = [sys.executable, "-m", "trainer", *common, f"hydra.run.dir={folder}"]
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    else:
        started = []
        for number, name in enumerate(within):
            meet = ["launch.nnodes=2", f"launch.node_rank={number}", "launch.master_addr=10.9.0.1"]
            own = [*meet, "launch.nproc=1", "launch.master_port=29511", f"hydra.run.dir={folder}-{number}"]
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "trainer", *common, *own]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        if any(process.wait() for process in started):
            raise SystemExit(f"{words} failed")
        folder = Path(f"{folder}-0")
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [p["metrics"]["perf/step_s"] for p in points if p["step"] > updates // 3 and "perf/step_s" in p["metrics"]]
    if "strategy=local_sgd" in words:
        steps = [sum(steps[n : n + 4]) / 4 for n in range(len(steps) - 3)]
    return float(usual(steps))


@contextmanager
def hosts(gbit: float) -> Iterator[tuple[str, ...]]:
    """Two network namespaces with a link of so many Gbit/s."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for name in HOSTS:
        ip("netns", "add", name)
    try:
        ip("link", "add", "eth", "netns", HOSTS[0], "type", "veth", "peer", "name", "eth", "netns", HOSTS[1])
        for number, name in enumerate(HOSTS):
            ip("-n", name, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", name, "link", "set", device, "up")
            burst = max(64, int(gbit * 1000))  # kB: a fast rate needs a larger bucket
            limit = ["rate", f"{gbit * 1000:g}mbit", "burst", f"{burst}kb", "latency", "50ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", "root", "tbf", *limit)
        yield HOSTS
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


def main() -> None:
    """Print the table, a row when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--only", default="", help="here, or between: one part of the table")
    typed_words = parser.parse_args()
    updates, only = typed_words.updates, typed_words.only
    words = [*RUN, "strategy=advise", "launch.nproc=4", f"advise.updates={updates}"]
    with tempfile.TemporaryDirectory() as made, compose.hydra_app() as app:
        folder = Path(made)
        asked = advise.Asked(app, words, "config", compose.compose(app, words), ())
        plain = advise._plain(asked)
        assert plain is not None
        found = advise._measured(asked, plain, folder)
        rows = {row.candidate.name: row for row in found.rows}
        print(found.machine, flush=True)
        print("| workers | strategy | predicted | measured | ratio |\n|---|---|---|---|---|", flush=True)

        def show(where: str, name: str, predicted: float, took: float) -> None:
            print(f"| {where} | {name} | {predicted:.2f} s | {took:.2f} s | {predicted / took:.2f} |", flush=True)

        for name in ON_ONE_HOST if only != "between" else ():
            options, typed = rows[name].options, rows[name].candidate.words
            assert options is not None
            took = measured(folder / name.replace(" ", "-").replace("=", ""), updates, "launch.nproc=4", *typed)
            show("4 on one host", name, cost_of(options, found.case, found.machine.group(4)).step, took)
        for gbit in GBIT if only != "here" else ():
            here = found.machine.group(2)  # both namespaces share this machine's cores
            group = replace(here, link=here.link.or_slower(Link.declared(gbit, None)))
            for name in BETWEEN_HOSTS:
                options, typed = rows[name].options, rows[name].candidate.words
                assert options is not None
                with hosts(gbit) as within:
                    took = measured(folder / f"{name[:5]}-{gbit}", updates, *typed, within=within)
                show(f"2 hosts, {gbit:g} Gbit/s", name, cost_of(options, found.case, group).step, took)


if __name__ == "__main__":
    main()
