"""What the conformance suite's processes do: the run's own pieces (trainer.worker.build, trainer.loop), looked at inside.

Every function takes (seat, payload, ...) like a role's entry, and returns plain data for the parent to judge.
"""

from __future__ import annotations

import copy
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn

from trainer.build import locate
from trainer.errors import RunFailed
from trainer.launch.local import resolve
from trainer.loop import Training, fit, train_epoch
from trainer.report import Report
from trainer.strategies.base import Seat
from trainer.worker import build, settings

LATE_S = 4.0


def each_case(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Entry of every role: all cases one after the other, each with a store, members and servers of its own."""
    answers = []
    for number, case in enumerate(payload["cases"]):
        own = replace(seat, store=dist.PrefixStore(f"case{number}", seat.store))
        entry = case["entry"] if seat.role == "worker" else case["payload"]["plan"]["entries"][seat.role]
        try:
            answers.append(resolve(entry)(own, copy.deepcopy(case["payload"]), **case["arguments"]))
        except RunFailed as error:
            if seat.role == "worker":
                raise
            answers.append(str(error))
    return {"pid": os.getpid(), "answers": answers}


@contextmanager
def taking_part(seat: Seat, payload: dict[str, Any]) -> Iterator[Training]:
    """A worker of the run up to the loop, as ``trainer.worker.train`` makes it."""
    config, plan = payload["config"], payload["plan"]
    seat.even = config["sampler"]["pad"]
    node = {k: v for k, v in config["strategy"].items() if k != "_target_"}
    with settings(config, plan, seat):
        strategy = locate(plan["strategy_worker"])(node, seat)
        try:
            run = build(config, plan, seat, strategy, Report(None, plan["total_steps"], seat.size))
            run.keep_best = lambda: None
            yield run
        finally:
            strategy.leave()


def parameters(run: Training) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in run.model.named_parameters()}


def buffers(run: Training) -> dict[str, np.ndarray]:
    return {name: b.numpy().copy() for name, b in run.model.named_buffers()}


def trained(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; what it came to."""
    with taking_part(seat, payload) as run:
        validation = fit(run)
        return {"parameters": parameters(run), "validation": validation, "steps": run.step}


def step_by_step(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Epochs of ``limit_train_batches`` updates; the parameters after each, and after settling at the end."""
    with taking_part(seat, payload) as run:
        after = []
        for epoch in range(epochs):
            train_epoch(run, epoch)
            after.append(parameters(run))
        run.strategy.settle()
        return {"after": after, "parameters": parameters(run)}


def summed(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Sums over the workers, of values that differ, with everybody's own left as it was."""
    with taking_part(seat, payload) as run:
        mine = torch.tensor([seat.rank + 1.0, 10.0 ** seat.rank, 1e-12 * seat.rank], dtype=torch.float64)
        before = mine.clone()
        sums = run.strategy.total(mine)
        return {"sums": sums.numpy(), "dtype": str(sums.dtype), "untouched": torch.equal(mine, before)}


def settled(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """An epoch on own batches, then settling: everything before and after."""
    with taking_part(seat, payload) as run:
        train_epoch(run, 0)
        before = buffers(run)
        run.strategy.settle()
        first = parameters(run), buffers(run)
        run.strategy.settle()
        return {"before": before, "parameters": first[0], "buffers": first[1], "again": (parameters(run), buffers(run))}


def interrupted(seat: Seat, payload: dict[str, Any], settle: bool) -> dict[str, Any]:
    """Two epochs in one go, and the same with a new process group or server that restores in between."""
    outcomes = {}
    with taking_part(replace(seat, store=dist.PrefixStore("whole", seat.store)), payload) as run:
        train_epoch(run, 0)
        if settle:
            run.strategy.settle()
        saved = _as_saved(run.strategy.state())
        train_epoch(run, 1)
        outcomes["lr"] = run.strategy.lr
        run.strategy.settle()
        outcomes["whole"] = {**parameters(run), **buffers(run)}
    if payload["plan"]["same_everywhere"]:
        if seat.rank == 0:
            seat.store.set("saved", saved)
        saved = seat.store.get("saved")
    with taking_part(replace(seat, store=dist.PrefixStore("resumed", seat.store)), payload) as run:
        train_epoch(run, 5)  # what restore() must undo
        run.strategy.restore(torch.load(io.BytesIO(saved), weights_only=True))
        train_epoch(run, 1)
        outcomes["resumed_lr"] = run.strategy.lr
        run.strategy.settle()
        outcomes["resumed"] = {**parameters(run), **buffers(run)}
    return outcomes


def _as_saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def started(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The start, drawn by every worker from a seed of its own; how that was taken."""
    payload["config"]["seed"] += seat.rank
    try:
        with taking_part(seat, payload) as run:
            return {"parameters": parameters(run), "buffers": buffers(run), "error": ""}
    except RunFailed as error:
        return {"error": str(error)}


def listening(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Which addresses this process listens on while it trains."""
    with taking_part(seat, payload) as run:
        train_epoch(run, 0)
        return {"addresses": [c.laddr for c in psutil.Process().net_connections("all") if c.status == "LISTEN"]}


def late(seat: Seat, payload: dict[str, Any], meeting: str, arrivals: list[float]) -> dict[str, Any]:
    """A meeting to which the workers come after so many seconds; what those who came are told, and when."""
    with taking_part(seat, payload) as run:
        run.strategy.total(torch.zeros(1, dtype=torch.float64))
        start = time.monotonic()
        time.sleep(arrivals[seat.rank])
        try:
            if meeting == "total":
                run.strategy.total(torch.zeros(1, dtype=torch.float64))
            elif meeting == "update":
                train_epoch(run, 0)
            else:
                run.strategy.settle()
        except RunFailed as error:
            return {"error": str(error), "seconds": time.monotonic() - start}
        finally:
            time.sleep(max(0.0, max(arrivals) + 1 - (time.monotonic() - start)))  # the next case starts together
        return {"error": ""}


class Blown(nn.Module):
    """A model whose inputs are far out of fp16's range."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs * 1e30)


def overflowing(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """One epoch whose gradients overflow on worker 1, and a good one; whether each changed the parameters."""
    with taking_part(seat, payload) as run:
        seen, good = [parameters(run)], run.forward
        for epoch, bad in enumerate((True, False)):
            run.forward = Blown(good) if bad and seat.rank == 1 else good
            try:
                train_epoch(run, epoch)
            except RunFailed as error:
                if "The loss is" not in str(error):
                    raise
            seen.append(parameters(run))
        changed = [any(not np.array_equal(a[n], b[n]) for n in a) for a, b in zip(seen, seen[1:], strict=False)]
        return {"changed": changed, "scale": run.strategy.updater.scaler.get_scale(), "parameters": seen[-1]}
