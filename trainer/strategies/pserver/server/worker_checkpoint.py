"""Reads a checkpoint of workers that ran the optimizer (single, collective) in the form that servers save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import store, tensor_tree
from trainer.optim.sparse import CLASSES
from trainer.optim.state_transfer import StateKeys
from trainer.optim.states import COLUMNS, States, by_name
from trainer.optim.updater import UpdaterState
from trainer.strategies.pserver.protocol.layout import TableSpec
from trainer.strategies.pserver.server.admission import Waiting
from trainer.strategies.pserver.server.shard import Saved, Shard
from trainer.weights.fresh_rows import RowInit, fresh_table
from trainer.weights.server_files import BEGAN, DENSE, TABLE


@dataclass(frozen=True)
class FirstWorkerState:
    """The part of the first worker's state that servers load."""

    model: Mapping[str, torch.Tensor]
    strategy: Mapping[str, Any]


def saved_by_workers(folder: Path, shard: Shard) -> Saved:
    """Read what a server loads from a checkpoint of workers (single, collective): parameters, and the state of the
    optimizer and of the schedule.

    Args:
        shard: of the run that goes on; the tables of its layout are looked for.
    """
    part = FirstWorkerState(
        **tensor_tree.read(folder / store.parts(folder)[0], [*FirstWorkerState.__dataclass_fields__])
    )
    updater, model = UpdaterState(**part.strategy["updater"]), part.model
    states = by_name(updater.optimizer, updater.names)
    tables = {f"{spec.name}.weight": spec for spec in shard.layout.tables}
    dense = {name: value for name, value in model.items() if name not in tables}
    tensors, numbers = _dense(dense, states)
    saved, began = StateKeys(updater.kind, {}, tables), {}
    for name, spec in tables.items():
        rule = CLASSES[shard.tables[spec.number].kernel.name].__name__
        state = states.get(name, {}) if saved.kind_of(name) in ("", rule) else {}
        tensors |= _rows(model[name], state, spec, shard)
        began[spec.name] = updater.steps - int(state.get("step", 0))
    meta: dict[str, Any] = {
        "optimizer": saved.kind_of(""),
        "samples": store.about(folder).samples,
        "version": updater.steps,
        "updates": updater.steps,
        "updates_per_step": 1,
        "numbers": numbers,
        BEGAN: began,
    }
    return tensors, meta if updater.plateau is None else {**meta, "scale": updater.plateau["scale"]}


def _dense(model: Mapping[str, torch.Tensor], states: States) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Tensors and numbers by the names that a server uses. A parameter that never had a gradient gets zeros for the
    state that others have."""
    tensors = {f"{DENSE}|{name}|0": value.reshape(-1) for name, value in model.items()}
    numbers: dict[str, float] = {}
    for key in sorted({key for name in model for key in states.get(name, {})}):
        values = {name: states.get(name, {}).get(key) for name in model}
        there = [value for value in values.values() if value is not None]
        if all((isinstance(v, torch.Tensor) and v.dim() == 0) or isinstance(v, (int, float)) for v in there):
            numbers[f"{DENSE}.{key}|"] = max(float(value) for value in there)
            continue
        for name, value in values.items():
            whole = torch.zeros_like(model[name]) if value is None else value
            tensors[f"{DENSE}.{key}|{name}|0"] = whole.reshape(-1)
    return tensors, numbers


def _rows(weight: torch.Tensor, state: Mapping[str, Any], spec: TableSpec, shard: Shard) -> dict[str, torch.Tensor]:
    """The rows of a table that differ from fresh ones."""
    table = shard.tables[spec.number]
    keys = COLUMNS[table.kernel.name]
    initial = table.kernel.initial
    width = table.kernel.state_columns(spec.dim)
    remembered = torch.full((len(weight), width), initial, dtype=weight.dtype)
    if keys and all(key in state for key in keys):
        remembered = torch.cat([state[key].reshape(len(weight), -1) for key in keys], dim=1)
    fresh = fresh_table(shard.config.seed, spec.name, tuple(weight.shape), RowInit(spec.init, spec.scale), weight.dtype)
    ids = ((weight != fresh).any(1) | (remembered != initial).any(1)).nonzero().flatten()
    found = {
        "ids": ids,
        "rows": torch.cat([weight[ids], remembered[ids]], dim=1),
        "touched": torch.zeros_like(ids),
        **{name: torch.from_numpy(nobody.whole()) for name, nobody in Waiting().state().items()},
    }
    return {f"{TABLE}|{spec.name}|{key}": value for key, value in found.items()}
