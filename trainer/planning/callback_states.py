"""Which callback's saved state belongs to which callback of a resumed run: that of the same class and arguments,
whatever its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Nodes = Sequence[Mapping[str, Any]]


def name_of(number: int, node: Mapping[str, Any]) -> str:
    """How messages and checkpoints call a callback."""
    return f"callbacks[{number}] ({node.get('_target_')})"


def places_before(before: Nodes, now: Nodes) -> list[int | None]:
    """For each callback, its place in the run before: that of an equal one, else of one of the same class; None: it is
    new."""
    found: list[int | None] = [None] * len(now)
    for names in ((), ("_target_",)):  # all of it, then the class alone
        for number, node in enumerate(now):
            if found[number] is None:
                wanted = _some(node, names)
                places = (n for n, old in enumerate(before) if n not in found and _some(old, names) == wanted)
                found[number] = next(places, None)
    return found


def _some(node: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These keys of a config node; none: all."""
    return {name: value for name, value in node.items() if name in (names or node)}


def moved(states: Mapping[str, Any], before: Nodes, now: Nodes) -> dict[str, Any]:
    """The saved states of callbacks under the names of this run's; what else is saved beside them stays."""
    names = {name_of(number, node) for number, node in enumerate(before)}
    kept = {name: state for name, state in states.items() if name not in names}
    for number, place in enumerate(places_before(before, now)):
        if place is not None and (name := name_of(place, before[place])) in states:
            kept[name_of(number, now[number])] = states[name]
    return kept


def changes(before: Nodes, now: Nodes) -> Iterator[str]:
    """Yield one line for each callback that begins anew, has other arguments than its state was made with, or is
    gone."""
    places = places_before(before, now)
    for number, (place, node) in enumerate(zip(places, now, strict=True)):
        if place is None:
            yield f"{name_of(number, node)}: begins anew, because the checkpoint has no state of it"
        elif before[place] != node:
            yield f"{name_of(number, node)}: goes on with the state that it had under its old arguments"
    for number, node in enumerate(before):
        if number not in places:
            yield f"the state of {name_of(number, node)}, which this run does not have"
