"""Many seeds, in several processes, and a table of what came of them."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

PART = 100
"""Seeds that a process plays before it tells."""
SHOWN = 60
"""Lines of a trace that is shortened."""
TRACED = 10
"""Failing seeds of a call that are printed with their trace: a defect that most seeds find needs no more."""


def part(
    seeds: range, mode: str | None, mutation: str | None
) -> tuple[int, Counter[str], Counter[str], list[tuple[int, str]]]:
    """Some seeds: how many, what was injected, how they ended, which promises were broken."""
    import torch

    from tests.simulation.mutations import mutated
    from tests.simulation.run import simulate
    from tests.simulation.scenario import Scenario
    from tests.simulation.stage import STAGE

    torch.set_num_threads(1)
    if gc.get_freeze_count() == 0:  # what was imported is no garbage: looked at once, not again and again
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
    injected: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    broken = []
    with STAGE.ready(), mutated(mutation):
        for seed in seeds:
            outcome = simulate(Scenario.drawn(seed, mode))
            injected += outcome.injected
            ends[f"{outcome.scenario.mode} {'done' if outcome.end == 'done' else 'failed, as it must'}"] += 1
            if outcome.violation:
                broken.append((seed, outcome.violation))
    return len(seeds), injected, ends, broken


def found_by(mutation: str, seeds: range, mode: str | None = None) -> tuple[int, str] | None:
    """The first of these seeds that finds a defect, and what it finds; None: none does."""
    from tests.simulation.mutations import mutated
    from tests.simulation.run import simulate
    from tests.simulation.scenario import Scenario
    from tests.simulation.stage import STAGE

    with STAGE.ready(), mutated(mutation):
        for seed in seeds:
            if violation := simulate(Scenario.drawn(seed, mode)).violation:
                return seed, violation
    return None


def one(seed: int, mode: str | None, mutation: str | None, whole: bool = False) -> tuple[list[str], str]:
    """A seed with its trace: the lines to print, and which promise was broken."""
    from tests.simulation.mutations import mutated
    from tests.simulation.run import simulate
    from tests.simulation.scenario import Scenario

    scenario = Scenario.drawn(seed, mode)
    with mutated(mutation):
        outcome = simulate(scenario, tracing=True)
    lines = outcome.trace
    if not whole and len(lines) > SHOWN:
        lines = [*lines[: SHOWN // 6], f"... {len(lines) - SHOWN} lines (--whole-trace)", *lines[-SHOWN * 5 // 6 :]]
    broken = f"VIOLATION: {outcome.violation}" if outcome.violation else "no promise was broken"
    end = f"ended after {outcome.virtual_s:.1f} s of virtual time: {outcome.end}"
    return [f"{scenario}", *lines, end, broken], outcome.violation


def many(first: int, last: int, mode: str | None, mutation: str | None, jobs: int) -> int:
    """Play a range of seeds; print those that break a promise, and a table of what was injected. Returns 1 if one is
    broken."""
    began, done = time.monotonic(), 0
    injected: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    parts = [range(n, min(n + PART, last)) for n in range(first, last, PART)]
    for size, more, how, found in _in_processes(partial(part, mode=mode, mutation=mutation), parts, jobs):
        done += size
        injected += more
        ends += how
        for place, (seed, violation) in enumerate(found, len(broken)):
            print(f"seed {seed}: {violation}\n  replay: {_replay(seed, mode, mutation)}", flush=True)
            if place < TRACED:
                print(*[f"    {line}" for line in one(seed, mode, mutation)[0]], sep="\n", flush=True)
        broken += found
        if sys.stderr.isatty():
            print(
                f"\r{done} of {last - first} runs, {done / (time.monotonic() - began):.0f}/s", end="", file=sys.stderr
            )
    seconds = time.monotonic() - began
    print(f"\n{done} runs in {seconds:.0f} s ({done / seconds:.0f}/s), {len(broken)} violations")
    for name, count in (*sorted(ends.items()), *sorted(injected.items())):
        print(f"  {name:<26}{count:>12,}")
    return bool(broken)


def _in_processes(function: Any, parts: list[range], jobs: int) -> Iterator[Any]:
    if jobs == 1:
        yield from map(function, parts)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(function, parts)


def _replay(seed: int, mode: str | None, mutation: str | None) -> str:
    more = (f" --mode {mode}" if mode else "") + (f" --mutation {mutation}" if mutation else "")
    return f"python -m tests.simulation --seed {seed}{more}"
