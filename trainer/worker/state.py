"""Everything of a worker that the rest of its run depends on, as nested plain data, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.strategies.contract import Share
from trainer.worker.loop import Line, Training


def state_of(run: Training, folder: Path, epoch: int, shared: bool, first: bool) -> dict[str, Any]:
    """A worker's part of a checkpoint. What several parts of it hold is the tensors themselves: pack it at once.

    Args:
        folder: of the checkpoint to come.
        epoch: in which the run goes on, after ``run.update`` updates of it.
        shared: all workers hold the same parameters.
        first: this worker writes for all.
    """
    share = run.strategy.save(folder)
    model = {name: p.detach() for name, p in run.model.named_parameters()}
    common = {"model": model, "strategy": share.common, "ema": None if run.ema is None else run.ema.state()}
    return {
        "common": common if first or not shared else None,
        "own": {
            "buffers": dict(run.model.named_buffers()),
            "averaged_buffers": None if run.ema is None else run.ema.average[run.ema.buffers :],
            "strategy": share.own,
            "line": {**asdict_line(run.line), "seen": run.line.meter.state()},
            "randomness": randomness(run),
        },
        "run": {
            "epoch": epoch,
            "update": run.update,
            "step": run.step,
            "samples": run.samples,
            "validated": run.validated,
            "examined": run.examined,
            "report": run.report.state(),
            "early_stop": None if run.early_stop is None else run.early_stop.state(),
            "callbacks": run.callbacks.state() if run.callbacks else {},
        },
    }


def go_on(run: Training, folder: Path, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Make a worker what it was.

    Args:
        folder: of the checkpoint.
        own: the worker's part; first: that of the first worker, which has what is common to all.
    """
    told, common, mine = own["run"], own["common"] or first["common"], own["own"]
    run.epoch, run.update, run.step, run.samples = told["epoch"], told["update"], told["step"], told["samples"]
    run.validated = told["validated"]
    run.examined = dict(told["examined"])
    _put(dict(run.model.named_parameters()), common["model"], "the model")
    _put(dict(run.model.named_buffers()), mine["buffers"], "the model")
    run.strategy.load(folder, Share(common["strategy"], mine["strategy"]))
    if run.ema is not None:
        run.ema.load(common["ema"])
        run.ema.load(
            {"step": run.ema.step, "average": [*run.ema.average[: run.ema.buffers], *mine["averaged_buffers"]]}
        )
    if run.early_stop is not None and told["early_stop"] is not None:
        run.early_stop.load(told["early_stop"])
    if run.callbacks:
        run.callbacks.load(told["callbacks"])
    run.report.load(told["report"])
    run.feed.waited = run.report.data_waited
    _put_line(run.line, mine["line"], next(iter(run.model.parameters())).device)
    put_randomness(mine["randomness"], run)


def asdict_line(line: Line) -> dict[str, Any]:
    """The numbers of a line."""
    return {name: getattr(line, name) for name in ("batches", "printed", "due", "lr", "number", "before")}


def _put_line(line: Line, state: Mapping[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if name != "seen":
            setattr(line, name, value)
    line.meter.load(_moved(state["seen"], device))


def randomness(run: Training) -> dict[str, Any]:
    """The states of this process's generators."""
    device = next(iter(run.model.parameters())).device
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def put_randomness(state: Mapping[str, Any], run: Training) -> None:
    """Go on drawing from there."""
    device = next(iter(run.model.parameters())).device
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@torch.no_grad()
def _put(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def _moved(node: Any, device: torch.device) -> Any:
    """The same with its tensors on a device."""
    if isinstance(node, torch.Tensor):
        return node.to(device)
    return [_moved(one, device) for one in node] if isinstance(node, Sequence) and not isinstance(node, str) else node
