"""Converts optimizer states between torch's numbering and parameter names, for use by another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

States = dict[str, dict[str, Any]]
"""Parameter name -> state key -> tensor or number."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""State keys of a row by sparse rule, in the order of the columns that a server keeps behind the row."""
PARTS = ("dense", "sparse")


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's ``state_dict`` as an object.

    Attributes:
        state: by the parameter's number; a user's optimizer may have state of no parameter under other keys.
        others: further keys of a user's optimizer, e.g. Lookahead's slow weights.
    """

    state: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    param_groups: Sequence[Mapping[str, Any]] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The numbers of the parameters, in the order of the groups."""
        return [number for group in self.param_groups for number in group["params"]]

    @property
    def of_no_parameter(self) -> dict[Any, Any]:
        """The state whose key is no parameter's number."""
        ids = set(self.ids)
        return {key: value for key, value in self.state.items() if key not in ids}


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> States:
    """Convert an optimizer's ``state_dict`` (or a pair: dense and tables) to each parameter's state by name.

    Args:
        names: of the parameters, in the order of the optimizer's groups.
    """
    left, found = iter(names), States({name: {} for name in names})
    for part in _parts(saved):
        found |= {name: dict(part.state.get(number, {})) for number, name in zip(part.ids, left, strict=False)}
    return found


def groups_by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """For each parameter name, the number of its group in an optimizer's ``state_dict`` (or a pair), and the group's
    settings."""
    left = iter(names)
    groups = [group for part in _parts(saved) for group in part.param_groups]
    return {
        name: (number, group)
        for number, group in enumerate(groups)
        for _, name in zip(group.get("params", ()), left, strict=False)
    }


def of_no_parameter(saved: Mapping[str, Any], made_with: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of what an optimizer's ``state_dict`` (or a pair) has beside the state of its parameters and the settings
    of its groups.

    Args:
        made_with: the settings of the groups when they were made; later keys were added by the optimizer.
    """
    parts = _parts(saved)
    groups = [group for part in parts for group in part.param_groups]
    later = {key for group, made in zip(groups, made_with, strict=False) for key in added(group, made)}
    keys = [str(key) for part in parts for key in (*part.others, *part.of_no_parameter)]
    return [*keys, *(f"{key} of its groups" for key in sorted(later))]


def added(group: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """The keys that an optimizer has added to a parameter group since it was made."""
    return [key for key in group if key not in made and key != "params"]


def put(
    live: Mapping[str, Any],
    names: Sequence[str],
    states: Mapping[str, Mapping[str, Any]],
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Convert states by parameter name to a ``state_dict`` with the groups of the live optimizer's.

    Args:
        source: the ``state_dict`` from which state of no parameter is copied; None: the live one.
    """
    left, made = iter(names), []
    for part, other in zip(_parts(live), _parts(live if source is None else source), strict=True):
        state = {n: dict(states[name]) for n, name in zip(part.ids, left, strict=False) if states.get(name)}
        own = {"state": {**other.of_no_parameter, **state}, "param_groups": part.param_groups}
        made.append({**part.others, **other.others, **(own if part.param_groups else {})})
    return dict(zip(PARTS, made, strict=True)) if _is_pair(live) else made[0]


def _parts(saved: Mapping[str, Any]) -> list[OptimizerState]:
    return [optimizer_state(saved[part]) for part in PARTS] if _is_pair(saved) else [optimizer_state(saved)]


def _is_pair(saved: Mapping[str, Any]) -> bool:
    return set(saved) == set(PARTS)


def optimizer_state(saved: Mapping[str, Any]) -> OptimizerState:
    """An optimizer's ``state_dict`` as an object."""
    known = {key: saved[key] for key in ("state", "param_groups") if key in saved}
    return OptimizerState(**known, others={key: value for key, value in saved.items() if key not in known})


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer makes its updates by fused kernels, see :mod:`trainer.optim.fused`."""
    return any(bool(group.get("fused")) for group in optimizer.param_groups)


def trains_others(optimizer: Any) -> bool:
    """Whether an optimizer trains other weights than those that are evaluated, and exchanges them by its methods
    ``eval`` and ``train``."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))
