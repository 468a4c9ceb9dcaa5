"""Converts a worker's state in a checkpoint to another strategy (optimizer in workers or servers) or number of
replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import store
from trainer.checkpoint.tensor_tree import read
from trainer.optim.sparse import CLASSES
from trainer.optim.state_transfer import BETWEEN
from trainer.optim.states import COLUMNS, States, put
from trainer.optim.updater import UpdaterState
from trainer.strategies.replicas import HasReplicas
from trainer.weights import server_files
from trainer.weights.server_files import DENSE, TABLE
from trainer.worker.state import WorkerState
from trainer.worker.training import Training

OWN, AVERAGED = "own", ("model", "ema", "strategy")
"""Of a worker's part."""


def from_servers(run: Training, folder: Path, part: WorkerState) -> WorkerState:
    """Make a worker's state from the servers' files, for a strategy whose workers hold parameters and optimizer."""
    assert part.model is not None
    updater, parts = run.strategy.updater, server_files.parts_of(folder)
    model = server_files.parameters(folder, part.model)
    states = _dense(parts, model)
    for name, about in parts[0].tables.items():
        states[f"{name}.weight"] = _rows(parts, name, about, updater.sparse_start)
    own, before = UpdaterState(**updater.state()), _before(part)
    rules = [CLASSES[about.kernel].__name__ for about in parts[0].tables.values()]
    kind = BETWEEN.join([str(parts[0].meta.get("optimizer", own.kind)).partition(" (")[0], *rules[:1]])
    optimizer = put(own.optimizer, updater.names, states)
    made = replace(own, kind=kind, steps=parts[0].version, optimizer=optimizer, plateau=before.plateau)
    return replace(part, model=model, strategy={"updater": vars(made)}, own={})


def for_servers(run: Training, part: WorkerState) -> WorkerState:
    """Make a pserver worker's state from a checkpoint without servers; the servers read the same file themselves."""
    assert part.model is not None
    live = {name: p.detach() for name, p in run.model.named_parameters()}
    model = {name: live[name] if live[name].numel() == 0 else value for name, value in part.model.items()}
    before, own = _before(part), UpdaterState(**run.strategy.updater.state())
    made = replace(own, steps=before.steps, plateau=before.plateau)
    return replace(part, model=model, strategy={"updater": vars(made)}, own={})


def _before(part: WorkerState) -> UpdaterState:
    assert part.strategy is not None
    return UpdaterState(**part.strategy["updater"])


def _dense(parts: Sequence[server_files.ServerFile], model: Mapping[str, torch.Tensor]) -> States:
    """The state that the servers' optimizer has saved of each dense parameter."""
    states: States = {}
    for kind, cut in server_files.pieces(parts).items():
        for name, some in cut.items() if kind != DENSE else ():
            states.setdefault(name, {})[kind.removeprefix(f"{DENSE}.")] = server_files.whole(model[name], some)
    numbers = {
        key.removeprefix(f"{DENSE}.").partition("|")[0]: value
        for part in parts
        for key, value in part.meta["numbers"].items()
    }
    for state in states.values():
        state |= {key: torch.tensor(value) for key, value in numbers.items()}
    return states


def _rows(
    parts: Sequence[server_files.ServerFile], name: str, about: server_files.TableFacts, start: float
) -> dict[str, Any]:
    """The state of a table's optimizer for all rows; the initial state for rows that were never updated."""
    rule, rows, dim = about.kernel, about.num_rows, about.dim
    if not COLUMNS[rule]:
        return {}
    assert rows is not None
    width = 1 if rule == "rowwise_adagrad" else dim
    whole = torch.full((rows, width * len(COLUMNS[rule])), start, dtype=about.kind)
    for part in parts:
        whole.index_copy_(0, part[f"{TABLE}|{name}|ids"], part[f"{TABLE}|{name}|rows"][:, dim:])
    cut = whole.split(width, dim=1)
    state: dict[str, Any] = {
        key: (one.flatten() if rule == "rowwise_adagrad" else one.contiguous())
        for key, one in zip(COLUMNS[rule], cut, strict=True)
    }
    made = parts[0].steps(name)
    steps = {"adam": made, "adagrad": torch.tensor(float(made))}
    return state | ({"step": steps[rule]} if rule in steps else {})


def averaged(strategy: HasReplicas, folder: Path, first: WorkerState) -> WorkerState:
    """Return the first worker's part with the mean of all replicas' parameters, moving averages and optimizer states.

    Parts are read one after the other, so that two of them are in memory at a time.
    """
    names = store.parts(folder)
    own = [read(folder / name, [OWN])[OWN] for name in names]
    total = None
    for name, weight in zip(names, strategy.weights(own), strict=True):
        total = _add(total, read(folder / name, AVERAGED), weight)
    mean = _like(total, {name: getattr(first, name) for name in AVERAGED})
    return replace(first, **mean, own=strategy.averaged(own[0]))


def _add(total: Any, node: Any, weight: float) -> Any:
    """Add a replica's nested state, times its weight, to the sum so far (None: it is the first).

    Floating tensors with a dimension are summed as float64. Everything else (counts, settings, tensors without a
    dimension) comes from the first replica that has it.
    """
    if isinstance(node, torch.Tensor) and node.is_floating_point() and node.dim():
        part = node.double() * weight
        return part if total is None else total + part
    if isinstance(node, Mapping):
        before = {} if total is None else total
        return {**before, **{key: _add(before.get(key), value, weight) for key, value in node.items()}}
    if isinstance(node, (list, tuple)):
        before = [] if total is None else total
        return [_add(before[n] if n < len(before) else None, value, weight) for n, value in enumerate(node)]
    return node if total is None else total


def _like(total: Any, node: Any) -> Any:
    """Convert a sum to the dtypes of a replica's state."""
    if isinstance(total, torch.Tensor):
        return total.to(node.dtype) if isinstance(node, torch.Tensor) else total
    if isinstance(total, Mapping):
        known = node if isinstance(node, Mapping) else {}
        return {key: _like(value, known.get(key)) for key, value in total.items()}
    if isinstance(total, list):
        items = list(node) if isinstance(node, (list, tuple)) else []
        made = [_like(value, items[n] if n < len(items) else None) for n, value in enumerate(total)]
        return tuple(made) if isinstance(node, tuple) else made
    return total
