"""The optimizer's parameter groups: weight decay and learning-rate factor of each parameter."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.config.instantiate import call_target
from trainer.errors import UserError
from trainer.optim.layers import NORMS, layer_numbers
from trainer.optim.states import is_fused

NAMES_SHOWN = 4
MUON = "trainer.optim.muon.Muon"
MATRIX = "matrix"
"""Key of a parameter group: Muon updates its parameters as matrices."""


@dataclass(frozen=True, order=True)
class Rate:
    """How a parameter is updated: its factor on the learning rate, whether its weights decay, and whether
    ``optimizer=muon`` updates it as a matrix."""

    lr: float = 1.0
    decays: bool = True
    matrix: bool = False


def rates(model: nn.Module, node: Mapping[str, Any]) -> dict[str, Rate]:
    """The :class:`Rate` of each parameter by name, from ``lr_factors``, ``layer_decay`` and ``decay_norms_and_biases``.
    A shared parameter stands under its first name.

    Args:
        node: the ``optimizer`` node; a user's own may lack these keys.
    """
    factors = node.get("lr_factors") or {}
    decay = node.get("layer_decay")
    layers = layer_numbers(model) if decay is not None else {}
    last = max(layers.values(), default=0)
    all_decay = node.get("decay_norms_and_biases") or node.get("weight_decay") == 0
    spared = set() if all_decay else set(undecayed(model))
    matrices = set()
    if node.get("_target_") == MUON:
        from trainer.optim.hidden_matrices import hidden_matrices

        matrices = hidden_matrices(model)
    found = {}
    for name, aliases in _aliases(model).items():
        by_depth = 1.0 if decay is None else float(decay) ** (last - layers[name])
        found[name] = Rate(_factor(aliases, factors) * by_depth, name not in spared, name in matrices)
    return found


def undecayed(model: nn.Module) -> Iterator[str]:
    """Names of the parameters without weight decay: biases, norms, and all with at most one dimension; and those of the
    model's ``no_weight_decay()`` (timm's convention)."""
    own = getattr(model, "no_weight_decay", None)
    named = set(own()) if callable(own) else set()
    of_norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        bias = name.rpartition(".")[2] == "bias"
        if bias or parameter.dim() <= 1 or id(parameter) in of_norms or name in named:
            yield name


def check_patterns(model: nn.Module, node: Mapping[str, Any]) -> None:
    """Check ``optimizer.lr_factors``.

    Raises:
        UserError: a pattern matches no parameter (the message has the nearest names), or nothing is left to train.
    """
    factors = node.get("lr_factors") or {}
    aliases = [a for names in _aliases(model).values() for a in names]
    for pattern in factors:
        if any(_matches(name, pattern) for name in aliases):
            continue
        places = list(dict.fromkeys(p for name in aliases for p in _prefixes(name)))
        near = difflib.get_close_matches(pattern.removesuffix(".*"), places, 1, 0.5)
        parts = [p for p in places if "." not in p]
        shown = ", ".join(parts[:NAMES_SHOWN]) + (" and more" if len(parts) > NAMES_SHOWN else "")
        raise UserError(
            f"optimizer.lr_factors={{{pattern}: {factors[pattern]}}}",
            f"no parameter of the model has a name like {pattern}; its parts are {shown}",
            f"'optimizer.lr_factors={{{near[0]}: {factors[pattern]}}}'" if near else "",
        )
    frozen = {n for n, rate in rates(model, node).items() if rate.lr == 0}
    if frozen.issuperset(n for n, p in model.named_parameters() if p.requires_grad):
        last = _prefixes(list(_aliases(model))[-1])[0]
        raise UserError(
            "optimizer.lr_factors",
            "factors of 0 freeze all of the model, and nothing is left to train",
            f"'optimizer.lr_factors={{*: 0, {last}: 1}}'",
        )


def freeze(model: nn.Module, node: Mapping[str, Any], tables: Iterable[Any] = ()) -> None:
    """Turn off the gradients of parameters in groups whose learning-rate factor is 0.

    Args:
        tables: the model's sparse tables, which keep their gradients, as servers hold them; their rate is 0.
    """
    kept = {id(module.weight) for module in tables}
    found = rates(model, node)
    for name, parameter in model.named_parameters():
        if found[name].lr == 0 and id(parameter) not in kept:
            parameter.requires_grad_(False)


Groups = Sequence[tuple[Rate, list[Any]]]
"""Parameters by their rate, in a fixed order."""


def grouped(named: Iterable[tuple[str, Any]], found: Mapping[str, Rate]) -> list[tuple[Rate, list[Any]]]:
    """Group parameters by their rate, in the order in which the rates first occur."""
    groups: dict[Rate, list[Any]] = {}
    for name, parameter in named:
        groups.setdefault(found.get(name, Rate()), []).append(parameter)
    return list(groups.items())


def optimizer_of(node: Mapping[str, Any], groups: Groups, lr: float | None = None) -> torch.optim.Optimizer:
    """Make an optimizer with these parameter groups from an ``optimizer`` node.

    Args:
        node: the ``optimizer`` node.
        groups: empty if nothing is trained here; the optimizer then gets a parameter of no model.
        lr: learning rate instead of the node's (scaled to the batch).

    Raises:
        UserError: the optimizer does not take these parameters, or no groups, or cannot be fused.
    """
    groups = groups or [(Rate(), [torch.zeros(1, requires_grad=True)])]
    plain = len(groups) == 1 and not groups[0][0].matrix
    parameter_groups: list[Any] = (
        groups[0][1]
        if plain
        else [{"params": parameters, **({MATRIX: True} if rate.matrix else {})} for rate, parameters in groups]
    )
    optimizer: torch.optim.Optimizer = call_target(
        node, "optimizer", parameter_groups, kind=torch.optim.Optimizer, **({} if lr is None else {"lr": lr})
    )
    if is_fused(optimizer):
        from trainer.optim.fused import prepare, why_not

        named = ((f"a parameter of shape {tuple(p.shape)}", p) for _, parameters in groups for p in parameters)
        if why := why_not(optimizer, named):
            raise UserError("optimizer.fused=true", why, "optimizer.fused=false execution.fused_optimizer=false")
        prepare(optimizer)
    if plain and groups[0][0] == Rate():
        return optimizer
    for group, (rate, _) in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = group["lr"] * rate.lr
        if not rate.decays and "weight_decay" in group:
            group["weight_decay"] = 0.0
    return optimizer


def _factor(aliases: list[str], factors: Mapping[str, float]) -> float:
    """The factor of the last matching pattern; 1 without one."""
    return float(([1.0] + [f for p, f in factors.items() if any(_matches(n, p) for n in aliases)])[-1])


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches: ``head`` is a parameter or a whole module; ``*`` matches anything, also dots."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, under the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {all_[0]: all_ for all_ in names.values()}
