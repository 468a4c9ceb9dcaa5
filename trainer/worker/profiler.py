"""Measures where a step's time goes: marks in the loop, torch's profiler over a few updates, a table of the parts."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from trainer.host.files import replace_file
from trainer.strategies.contract import WAITS
from trainer.worker.training import Unprofiled

T = TypeVar("T")
Interval = tuple[float, float]
MARKED = ("data", "forward", "backward", "optimizer")
PARTS = ("data", "forward", "backward", "communication", "optimizer", "ours")
ELSEWHERE = "evaluation"


class Profiled(Unprofiled):
    """Runs torch's profiler over a few updates: ``trace.N.json.gz``, ``profile.N.json`` and a printed table.

    On a GPU the profiler waits at each mark, so that a part's time is that of its kernels.

    Args:
        worker, folder: whose trace it is, and where it goes.
        after: updates before it begins, the profiler's own warm-up included; updates: how many are traced.
        total: updates of the run; where it is shorter, it begins earlier and traces fewer.
        cuda: whether the work is a GPU's.
    """

    def __init__(self, worker: int, folder: Path, after: int, updates: int, total: int, cuda: bool) -> None:
        if not cuda:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports the GPU that is not there as an error
        warm_up = min(1, total - 1)
        self.worker, self.folder, self.cuda = worker, folder, cuda
        self.updates = min(updates, total - warm_up)
        self.start = max(0, min(after - warm_up, total - self.updates - warm_up))
        self.first = self.start + warm_up + 1
        self.done, self.open = 0, False
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        plan = schedule(wait=0, warmup=warm_up, active=self.updates, repeat=1)
        self.torch = torch.profiler.profile(activities=activities, schedule=plan, on_trace_ready=self._finish)
        self._begin_if_due()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        with record_function(f"trainer/{part}"):
            yield
            if self.open and self.cuda:
                torch.cuda.synchronize()

    def each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        iterator = iter(items)
        while True:
            with self(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def step(self) -> None:
        self.done += 1
        if self.open:
            self.torch.step()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self.done == self.start:
            self.torch.start()
            self.open = True

    def close(self, hangs: bool = False) -> None:
        if self.open and not (hangs and self.cuda):
            self.torch.stop()

    def _finish(self, profiler: torch.profiler.profile) -> None:
        self.open = False
        trace = self.folder / f"trace.{self.worker}.json.gz"
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt") as file:
            found = parts(json.load(file)["traceEvents"])
        if not found["steps"]:
            return
        last = self.first + found["steps"] - 1
        report = {"worker": self.worker, "updates": [self.first, last], **found, "trace": trace.name}
        replace_file(self.folder / f"profile.{self.worker}.json", json.dumps(report, indent=1))
        print("\n".join(table(report)), flush=True)


def table(report: dict[str, Any]) -> list[str]:
    """Format a profile as the lines of its printed table."""
    first, last = report["updates"]
    lines = [f"profile of worker {report['worker']}: updates {first} to {last}, {report['step_ms']:.3f} ms each"]
    lines += [f"  {name:<14}{part['ms']:>12.3f} ms{part['percent']:>8.1f} %" for name, part in report["parts"].items()]
    return [*lines, f"  {report['trace']} opens in https://ui.perfetto.dev"]


def parts(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the time of the steps in a Chrome trace, by part.

    Communication is time in which something is sent or awaited and no operator (on a GPU: no other kernel) runs. It is
    subtracted from the part in which it happens. ``ours`` is time that no part claims. A validation between two updates
    does not count.

    Args:
        events: of ``export_chrome_trace``, times in microseconds.

    Returns:
        ``steps``: how many; ``step_ms`` and for each of ``parts`` its ``ms``: of one step, on average; and ``percent``.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    named: dict[str, list[Interval]] = {}
    for event in complete:
        named.setdefault(str(event["name"]), []).append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    steps = [interval for name, found in named.items() if name.startswith("ProfilerStep#") for interval in found]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    computing = _spans(e for e in kernels or complete if (kernels or _is_operator(e)) and not _is_exchange(e))
    exchanging = _spans(event for event in complete if _is_exchange(event))
    inside = minus(union(steps), union(named.get(f"trainer/{ELSEWHERE}", [])))
    exposed = both(minus(exchanging, computing), inside)
    left, spent = minus(inside, exposed), {"communication": length(exposed)}
    for part in MARKED:
        spans = union(named.get(f"trainer/{part}", []))
        spent[part] = length(both(left, spans))
        left = minus(left, spans)
    spent["ours"] = length(left)
    whole, count = length(inside), max(1, len(steps))
    shares = {p: {"ms": spent[p] / count / 1e3, "percent": 100 * spent[p] / whole if whole else 0.0} for p in PARTS}
    return {"steps": len(steps), "step_ms": whole / count / 1e3, "parts": shares}


def _is_exchange(event: dict[str, Any]) -> bool:
    name = str(event["name"])
    return name.startswith(("gloo:", WAITS)) or (event.get("cat") == "kernel" and "nccl" in name.lower())


def _is_operator(event: dict[str, Any]) -> bool:
    """Whether an event is an operator that computes; events of c10d are handed over, and those of autograd contain
    others."""
    name = str(event["name"])
    return (
        event.get("cat") == "cpu_op"
        and "::" in name
        and not name.startswith(("c10d::", "autograd::", "torch::autograd::"))
    )


def _spans(events: Iterable[dict[str, Any]]) -> list[Interval]:
    return union([(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort time intervals and join those that overlap, covering the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def minus(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time intervals that are in the first list and not in the second; both as :func:`union` returns them."""
    kept, after = [], 0
    for start, end in some:
        while after < len(others) and others[after][1] <= start:
            after += 1
        for from_, to in others[after:]:
            if from_ >= end:
                break
            if from_ > start:
                kept.append((start, from_))
            start = max(start, to)
        if start < end:
            kept.append((start, end))
    return kept


def both(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time intervals that are in both lists of intervals."""
    return minus(some, minus(some, others))


def length(intervals: Iterable[Interval]) -> float:
    """The total length of time intervals, in their unit."""
    return sum(end - start for start, end in intervals)
