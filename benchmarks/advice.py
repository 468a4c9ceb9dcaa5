"""``python benchmarks/advice.py [--updates 12]``: how far the predictions of strategy=advise are from what is measured.

It measures short trainings with one and two workers, as strategy=advise does. Then it trains

- with four workers on this host,
- with two workers in two network namespaces, whose link has a chosen rate and latency (``slow_link.py``).

The table has both numbers. Other work on the machine makes them differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from slow_link import FIRST, hosts

from trainer.cli import advise, compose
from trainer.cli.short_trainings import short
from trainer.job.advice import cost_of
from trainer.planning.cost import Link
from trainer.worker.advice_probe import usual

RUN = ("+recipe=resnet50_flowers_demo", "data.batch_size=16", "execution.threads=1", "precision=fp32", "device=cpu")
ON_ONE_HOST = ("collective", "sharded optimizer", "sharded parameters", "bf16", "powersgd", "local_sgd k=4")
BETWEEN_HOSTS = ("collective", "comm_streams=4", "powersgd", "local_sgd k=4")
GBIT, MS = (0.1, 1.0, 10.0), (0.1, 10.0, 50.0)
"""Of the links, and each way."""


def measured(folder: Path, updates: int, *words: str, within: tuple[str, ...] = (), per_host: int = 1) -> float:
    """Seconds of an update after the first third: the lower quartile, of local_sgd's cycles of 4 updates.

    Args:
        within: the namespaces of hosts with so many workers each; none: one host, whose workers the words have.
    """
    common = [*RUN, *short(updates), "execution.log_every=1", "verbosity=quiet", *words]
    if not within:
        alone = [sys.executable, "-m", "trainer", *common, f"hydra.run.dir={folder}"]
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    else:
        started = []
        for number, name in enumerate(within):
            meet = ["launch.nnodes=2", f"launch.node_rank={number}", f"launch.master_addr={FIRST}"]
            own = [*meet, f"launch.nproc={per_host}", "launch.master_port=29511", f"hydra.run.dir={folder}-{number}"]
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
            options, typed = rows[name].options, advise.of_strategy(asked, rows[name].candidate)
            assert options is not None
            took = measured(folder / name.replace(" ", "-").replace("=", ""), updates, "launch.nproc=4", *typed)
            show("4 on one host", name, cost_of(options, found.case, found.machine.group(4)).step, took)
        for gbit, ms in itertools.product(GBIT, MS) if only != "here" else ():
            here = found.machine.group(2)  # both namespaces share this machine's cores
            group = replace(here, link=here.link.or_slower(Link.declared(gbit, ms, gloo=True)))
            for name in BETWEEN_HOSTS:
                options, typed = rows[name].options, advise.of_strategy(asked, rows[name].candidate)
                assert options is not None
                with hosts(gbit, ms) as within:
                    took = measured(folder / f"{name[:5]}-{gbit}-{ms}", updates, *typed, within=within)
                show(f"2 hosts, {gbit:g} Gbit/s, {ms:g} ms", name, cost_of(options, found.case, group).step, took)


if __name__ == "__main__":
    main()
