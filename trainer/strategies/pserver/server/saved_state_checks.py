"""Whether saved persistables fit the run that is to start from them: mode, precision, optimizer, model and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.models.embedding_tables import dense_of, tables
from trainer.optim.groups import Rate, optimizer_of, rates
from trainer.optim.sparse import rule_of
from trainer.strategies.builtin import PserverDeclaration
from trainer.strategies.pserver.protocol import snapshot
from trainer.visible import shortened
from trainer.weights.server_files import ServerFile

GEO = "geo"
NUMBERS = ("age", "version", "updates", "updates_per_step")
TEXTS = ("mode", "optimizer", "dtype", "evict_by")
"""What a part, and server 0 of all, tell besides their tensors."""


def kept_by(node: Mapping[str, Any]) -> str:
    """For a check of saved server state: the tensors that an optimizer keeps of a parameter, e.g. ``SGD
    (momentum_buffer)``."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    optimizer = optimizer_of(node, [(Rate(), [parameter])])
    optimizer.step()
    names = sorted(n for n, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor))
    return f"{type(optimizer).__name__} ({', '.join(names) or 'nothing'})"


def refuse(
    config: RunConfig, declared: PserverDeclaration, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[UserError]:
    """Check the saved server state in ``strategy.load_from``: returns the errors of a run that cannot start from it.

    Args:
        config: the run's. declared: its strategy.
        model: as built, also without memory. optimizer: made from the config, with any parameters.
    """
    folder = str(declared.options.load_from)
    try:
        saved = snapshot.read(Path(folder))
    except UserError as error:
        return [UserError(f"strategy.load_from={folder}", f"{error.what}: {error.why}", "a folder that holds COMPLETE")]
    if damage := next(filter(None, map(_damage, saved.parts)), "") or _lacks(saved.meta, TEXTS, str):
        return [UserError(f"strategy.load_from={folder}", damage, "persistables as a run saves them")]
    return [
        UserError(f"strategy.load_from={folder}", why, instead)
        for why, instead in _misfits(saved, config, declared, model, optimizer)
    ]


def _damage(part: ServerFile) -> str:
    """Why a server could not begin from a sealed part, its file included; '' if it can."""
    try:
        meta = part.meta
    except (ValueError, TypeError, KeyError) as error:
        return f"{part.path}: its meta cannot be read ({type(error).__name__}: {error})"
    why = _lacks(meta, NUMBERS, int) or _lacks(meta, ("numbers", "tables"), dict)
    if not why and not all(isinstance(value, (int, float)) for value in meta["numbers"].values()):
        why = "its meta has a number of the optimizer that is none"
    if not why and meta["updates_per_step"] < 1:
        why = "its meta has updates_per_step=0"
    return f"{part.path}: {why}" if why else ""


def _lacks(meta: Mapping[str, Any], names: Sequence[str], kind: type[Any]) -> str:
    """What of these saved values is missing, of another kind or negative; '' if nothing is."""
    for name in names:
        value: Any = meta.get(name)
        if type(value) is not kind or (kind is int and value < 0):
            return f"its meta has {name}={shortened(repr(value))}" if name in meta else f"its meta lacks {name}"
    return ""


def _misfits(
    saved: snapshot.Snapshot,
    config: RunConfig,
    declared: PserverDeclaration,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, str]]:
    """What differs, and what to type instead."""
    then, mode = saved.meta, declared.mode
    if (then["mode"] == GEO) != (mode == GEO):
        why = f"strategy=pserver_{then['mode']} saved it, and in pserver_geo optimizers are the workers' and not saved"
        yield why, f"strategy=pserver_{then['mode']}"
        return
    if mode != GEO and (now := kept_by(config.optimizer)) != then["optimizer"]:
        yield (
            f"it holds the state of {then['optimizer']}, and this run's optimizer is {now}",
            "the optimizer that it was saved with",
        )
    strategy = declared.options
    if strategy.evict_after is not None and then["evict_by"] != strategy.evict_by:
        yield (
            f"the ages of its rows are counted by {then['evict_by']}",
            f"strategy.evict_by={then['evict_by']} (or strategy.evict_after=null)",
        )
    trained = _trained(config, model)
    dtype = str(_dtype(config, model)).removeprefix("torch.")
    if dtype != then["dtype"]:
        yield (
            f"its parameters are {then['dtype']}, and this run's are {dtype}",
            f"precision={'fp64' if then['dtype'] == 'float64' else 'fp32'}",
        )
    sizes: dict[str, int] = {}
    for piece in saved.dense:
        sizes[piece["name"]] = max(piece["stop"], sizes.get(piece["name"], 0))
    if why := _difference(sizes, trained, "{} elements of"):
        yield why, "the model that it was saved with"
    rule = "sgd" if mode == GEO else rule_of(config.optimizer, optimizer).name if any(tables(model)) else ""
    own = {
        name: [None if getattr(module, "unbounded", False) else module.num_embeddings, module.embedding_dim, rule]
        for name, module in tables(model)
    }
    found = {name: [table["num_rows"], table["dim"], table["kernel"]] for name, table in saved.tables.items()}
    if why := _difference(found, own, "(rows, columns, rule) = {} of table"):
        yield why, "the model and the optimizer.sparse that it was saved with"


def _difference(then: Mapping[str, Any], now: Mapping[str, Any], what: str) -> str:
    for name in [*now, *then]:
        if then.get(name) != now.get(name):
            sides = [f"{what} {name}".format(side[name]) if name in side else f"no {name}" for side in (then, now)]
            return f"it holds {sides[0]}, and this run's model has {sides[1]}"
    return ""


def _trained(config: RunConfig, model: nn.Module) -> dict[str, int]:
    """Elements of the parameters that servers will keep."""
    found = rates(model, config.optimizer)
    return {name: p.numel() for name, p in dense_of(model) if found[name].lr}


def _dtype(config: RunConfig, model: nn.Module) -> torch.dtype:
    return torch.float64 if config.precision == "fp64" else next(p.dtype for p in model.parameters())
