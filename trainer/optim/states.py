"""Converts optimizer states between torch's numbering and parameter names, for use by another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

States = dict[str, dict[str, Any]]
"""By the parameter's name, then by what is remembered: tensors, numbers."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""What each sparse rule's optimizer remembers of a row, in the order in which a server keeps it beside the row."""
PARTS = ("dense", "sparse")


@dataclass(frozen=True)
class Memory:
    """An optimizer's ``state_dict`` as an object."""

    state: Mapping[int, Mapping[str, Any]]
    param_groups: Sequence[Mapping[str, Any]]

    @property
    def ids(self) -> list[int]:
        """The numbers of the parameters, in the order of the groups."""
        return [number for group in self.param_groups for number in group["params"]]


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> States:
    """Convert an optimizer's ``state_dict`` (or a pair: dense and tables) to each parameter's state by name.

    Args:
        names: of the parameters, in the order of the optimizer's groups.
    """
    left, found = iter(names), States()
    for part in _parts(saved):
        found |= {name: dict(part.state.get(number, {})) for number, name in zip(part.ids, left, strict=False)}
    return found


def groups_by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """For each parameter name, the number of its group in an optimizer's ``state_dict`` (or a pair), and the group's settings."""
    left = iter(names)
    groups = [group for part in _parts(saved) for group in part.param_groups]
    return {
        name: (number, group)
        for number, group in enumerate(groups)
        for _, name in zip(group.get("params", ()), left, strict=False)
    }


def put(live: Mapping[str, Any], names: Sequence[str], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Convert states by parameter name to a ``state_dict`` with the groups of the live optimizer's."""
    left = iter(names)
    made = [
        vars(replace(part, state={n: dict(states[name]) for n, name in zip(part.ids, left, strict=False) if states.get(name)}))
        for part in _parts(live)
    ]  # fmt: skip
    return made[0] if "param_groups" in live else dict(zip(PARTS, made, strict=True))


def _parts(saved: Mapping[str, Any]) -> list[Memory]:
    return [Memory(**one) for one in ([saved] if "param_groups" in saved else [saved[part] for part in PARTS])]
