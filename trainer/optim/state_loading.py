"""Finds the state keys that an optimizer has for each parameter, and loads a saved state by parameter name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.host.sharded import distributed
from trainer.optim.sparse import DenseAndSparse
from trainer.optim.state_transfer import BETWEEN, StateKeys, StateTransfer, plan_transfer
from trainer.optim.states import States, by_name, is_fused, put, trains_others


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer as checkpoints name it: ``Adam``, or ``Adam + SparseAdam`` with tables."""
    return BETWEEN.join(type(part).__name__ for part in _parts(optimizer))


def state_keys(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> StateKeys:
    """The state that an optimizer will keep for each parameter after an update; the optimizer is not changed.

    Args:
        names: of the parameters, in the order of the optimizer's groups.
    """
    dense = _parts(optimizer)[0]
    keys = list(_tried(dense))
    of_dense = dict(zip(names, keys, strict=False))
    tables = tuple(names[len(keys) :])
    return StateKeys(kind_of(optimizer), {**of_dense, **dict.fromkeys(tables)}, tables)


def _tried(optimizer: torch.optim.Optimizer) -> Iterator[frozenset[str] | None]:
    """The state keys of each parameter, from an update of a copy with parameters of one element."""
    parameters = parameters_of(optimizer)
    stand_ins = [torch.zeros((1,) * p.dim(), dtype=p.dtype, device=p.device) for p in parameters]
    for stand_in in stand_ins:
        stand_in.requires_grad_().grad = torch.zeros_like(stand_in)
    try:
        tried = small_copy(optimizer, stand_ins)
        modes: Any = tried if trains_others(tried) else None
        if modes is not None:
            modes.train()
        tried.step()
        if modes is not None:  # as in a checkpoint
            modes.eval()
        kept = [tried.state.get(stand_in, {}) for stand_in in stand_ins]
    except Exception:  # a user's optimizer may need more than a gradient
        yield from [None] * len(parameters)
        return
    for one in kept:
        yield frozenset(key for key, value in one.items() if value is not None)


def small_copy(optimizer: torch.optim.Optimizer, stand_ins: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of an optimizer with a small tensor, of as many dimensions, in place of each parameter. It has no
    hooks."""
    parameters, state = parameters_of(optimizer), optimizer.state
    pairs = list(zip(parameters, stand_ins, strict=True))
    begun = {one: _small(state[p], one) for p, one in pairs if p in state}  # Adagrad's
    copies: dict[int, Any] = {id(p): one for p, one in pairs}
    copies[id(state)] = defaultdict(dict, begun)  # the state is as large as the model: it is not copied
    return copy.deepcopy(optimizer, copies)


def _small(state: Mapping[str, Any], stand_in: torch.Tensor) -> dict[str, Any]:
    """The state of a parameter, cut to the size of its stand-in."""
    side = stand_in.shape[:1] or (1,)
    tensors = {
        k: v.flatten()[:1].reshape((1,) * v.dim()).repeat((*side,) * v.dim())
        for k, v in state.items()
        if isinstance(v, torch.Tensor)
    }
    return {**state, **tensors}


def saved_keys(
    kind: str, states: States, tables: Collection[str] = (), of_no_parameter: Sequence[str] = ()
) -> StateKeys:
    """The :class:`StateKeys` of a saved state, for :func:`plan_transfer`."""
    keys = {name: [key for key, value in state.items() if value is not None] for name, state in states.items()}
    return StateKeys(kind, keys, tables, of_no_parameter)


def load_by_name(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    kind: str,
    saved: Mapping[str, Any],
    saved_names: Sequence[str],
) -> bool:
    """Load an optimizer's saved ``state_dict``, each parameter's state by its name.

    State of no parameter is loaded if class and parameters are the same; returns whether they are.

    Args:
        optimizer: without an update so far; state that is not loaded begins anew.
        names: of the optimizer's parameters, in the order of its groups.
        kind, saved, saved_names: class, ``state_dict`` and parameter names of the saved optimizer.
    """
    states, live = by_name(saved, saved_names), state_keys(optimizer, names)
    carried, now = plan_transfer(saved_keys(kind, states, live.tables), live), optimizer.state_dict()
    parameters = {name: p.detach() for name, p in zip(names, parameters_of(optimizer), strict=False)}
    found = states_to_load(carried, states, parameters)
    source = saved if carried.same else None
    optimizer.load_state_dict(put(now, names, {**by_name(now, names), **found}, source))
    if is_fused(optimizer):
        from trainer.optim.fused import prepare

        for part in _parts(optimizer):
            prepare(part)
    return carried.same


def states_to_load(carried: StateTransfer, states: States, parameters: Mapping[str, torch.Tensor]) -> States:
    """The saved states to load, by name, with the buffers that begin at zero; sharded like their parameters."""
    found = {
        name: {key: distributed(parameters[name], states[name][key]) for key in keys}
        for name, keys in carried.keys.items()
    }
    for name, keys in carried.zeros.items():
        found[name] |= {key: torch.zeros_like(parameters[name]) for key in keys}
    return found


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of dense parameters and of tables; without tables the one optimizer."""
    return list(optimizer.parts.values()) if isinstance(optimizer, DenseAndSparse) else [optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
