"""Compares a checkpoint with the model and the optimizer of the run that resumes from it, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainer.checkpoint import store, tensor_tree
from trainer.errors import UserError, why
from trainer.optim.sparse import CLASSES
from trainer.optim.state_loading import saved_keys
from trainer.optim.state_transfer import BETWEEN, StateKeys, named, plan_transfer
from trainer.optim.states import by_name, of_no_parameter
from trainer.optim.updater import UpdaterState
from trainer.planning.auto import ModelFacts
from trainer.planning.plan import GEO, Plan
from trainer.weights import server_files
from trainer.weights.server_files import DENSE, ServerFile

MODEL, STRATEGY = "model", "strategy"


@dataclass(frozen=True)
class Outline:
    """The first worker's part without values: the model's parameters, and the strategy's common state."""

    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


def begins_anew(plan: Plan, model: ModelFacts, folder: Path) -> list[str]:
    """Return one line for each part of the saved optimizer state that this run's optimizer cannot load, with parameter
    names.

    Raises:
        UserError: the checkpoint is of another model.
    """
    about = store.about(folder)
    part = Outline(**tensor_tree.outline(folder / store.parts(folder)[0], (MODEL, STRATEGY)))
    tables = model.optimizer.tables if model.optimizer is not None else ()
    _check_model(folder, part.model, {name: shape for name, shape in model.shapes.items() if name not in tables})
    if model.optimizer is None:
        return []
    if not about.servers or about.strategy == GEO:
        if (updater := part.strategy.get("updater")) is None:  # a strategy of somebody's own
            return []
        state = UpdaterState(**updater)
        others = of_no_parameter(state.optimizer, state.made_with)
        saved = saved_keys(state.kind, by_name(state.optimizer, state.names), tables, others)
    else:
        saved = _of_servers(folder, model.optimizer)
        if plan.topology.roles.get("server"):
            _check_moved(folder, saved, model.optimizer)
    return list(plan_transfer(saved, model.optimizer).lines(model.optimizer.keys))


def _check_model(folder: Path, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint without the model's parameters.

    Raises:
        UserError: it lacks one, or has another shape of it.
    """
    for name, shape in shapes.items():
        there = tuple(saved[name].shape) if name in saved else None
        if there != shape:
            has = f"has no {name}" if there is None else f"has {name} {there}"
            why_not = f"{folder} {has}, and this run's model has it as {shape}"
            raise UserError("resume", why_not, "the model of before")


def _of_servers(folder: Path, live: StateKeys) -> StateKeys:
    """The state that servers have saved of each parameter; for a table, everything that its rule keeps.

    Raises:
        UserError: their files cannot be read.
    """
    try:
        parts = server_files.parts_of(folder)
        kind = str(parts[0].meta.get("optimizer", "")).partition(" (")[0]
        rules = {
            f"{name}.weight": CLASSES[table.kernel].__name__ for part in parts for name, table in part.tables.items()
        }
        keys = {name: kept for part in parts for name, kept in _dense_keys(part)}
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            str(folder), f"its servers' parts cannot be read ({why(error)})", "another checkpoint"
        ) from error
    sparse = next(iter(rules.values()), "")
    return StateKeys(kind + (f"{BETWEEN}{sparse}" if sparse else ""), {**keys, **dict.fromkeys(rules)}, live.tables)


def _dense_keys(part: ServerFile) -> Iterator[tuple[str, list[str]]]:
    """Keys of the state that a server has saved of each of its dense parameters: vectors, and single numbers."""
    numbers = {key.removeprefix(f"{DENSE}.").partition("|")[0] for key in part.meta.get("numbers", {})}
    kinds: dict[str, set[str]] = {}
    for name in part:
        kind, *rest = name.split("|")
        if kind.partition(".")[0] == DENSE:
            kinds.setdefault(rest[0], set(numbers)).add(kind.removeprefix(DENSE).removeprefix("."))
    for name, keys in kinds.items():
        yield name, sorted(keys - {""})


def _check_moved(folder: Path, saved: StateKeys, live: StateKeys) -> None:
    """Refuse other trained parameters than before. Servers keep trained parameters and workers the others, and neither
    can hand over parameters to the other.

    Raises:
        UserError: others are trained now.
    """
    frozen, new = ([n for n in one.keys if n not in other.keys] for one, other in ((saved, live), (live, saved)))
    for names, said in ((frozen, "are frozen now"), (new, "were frozen before")):
        if names:
            why_not = (
                f"{named(names, ())} {said}, and parameter servers of {folder} keep the parameters that were trained"
            )
            raise UserError("resume", why_not, "the optimizer.lr_factors of before")
