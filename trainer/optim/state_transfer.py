"""Decides which saved state an optimizer loads, by parameter name, when the config has changed.

:func:`plan_transfer` decides it twice in the same way: for the plan, which lists the state that begins anew, and for
the workers and servers that load the state. This module imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.wording import counted

BEGINS_AT_ZERO: Mapping[str, frozenset[str]] = {
    "Adam": frozenset({"max_exp_avg_sq"}),
    "AdamW": frozenset({"max_exp_avg_sq"}),
    "RMSprop": frozenset({"momentum_buffer", "grad_avg"}),
}
"""Buffers that an option of torch's optimizers adds (amsgrad, momentum, centered); they begin at zero."""
BETWEEN = " + "
MOST_NAMES = 20


@dataclass(frozen=True)
class StateKeys:
    """The state keys of an optimizer.

    Attributes:
        kind: the class's name, e.g. ``Adam``; of dense parameters and tables ``Adam + SparseAdam``.
        keys: by parameter name; None: not known, as no trial update was possible.
        tables: names of the parameters that are updated by rows.
        of_no_parameter: names of further state that a user's optimizer keeps.
    """

    kind: str
    keys: Mapping[str, Collection[str] | None]
    tables: Collection[str] = ()
    of_no_parameter: Sequence[str] = ()

    def kind_of(self, name: str) -> str:
        """The class of the optimizer that updates a parameter."""
        dense, _, sparse = self.kind.partition(BETWEEN)
        return sparse if sparse and name in self.tables else dense


@dataclass(frozen=True)
class StateTransfer:
    """The saved state to load, by parameter name.

    Attributes:
        keys: state keys to load, by parameter name.
        zeros: keys of further buffers, which begin at zero.
        anew: (keys, reason) -> names of the parameters with this state, which begins anew.
        unused: saved keys that are dropped -> names of the parameters.
        gone: parameters with a saved state that are no longer trained.
        same: class and parameters are the same, so that state of no parameter is loaded as well.
        dropped: names of state of no parameter that is not loaded.
    """

    keys: dict[str, list[str]] = field(default_factory=dict)
    zeros: dict[str, list[str]] = field(default_factory=dict)
    anew: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    gone: list[str] = field(default_factory=list)
    same: bool = False
    dropped: Sequence[str] = ()

    def lines(self, trained: Collection[str]) -> Iterator[str]:
        """One line for everything that begins anew or is dropped, with the names of its parameters.

        Args:
            trained: the names of all parameters that the optimizer moves now.
        """
        for (what, why), names in self.anew.items():
            yield f"{what} of {named(names, trained)}: begins anew, because the checkpoint {why}"
        for what, names in self.unused.items():
            yield f"{what} of {named(names, trained)}, which the optimizer does not need now"
        if self.gone:
            yield f"the optimizer's state of {named(self.gone, ())}, which is not trained any more"
        if self.dropped:
            yield (
                f"{_listed(self.dropped)} of the optimizer as a whole, because its class or its parameters have changed"
            )


def plan_transfer(saved: StateKeys, live: StateKeys) -> StateTransfer:
    """Decide which saved state an optimizer loads: only state of the same parameter and of the same class.

    Args:
        saved: with the saved keys; a parameter that never had a gradient has none. live: with the needed keys.
    """
    gone = [name for name, keys in saved.keys.items() if keys and name not in live.keys]
    same = saved.kind == live.kind and list(saved.keys) == list(live.keys)
    found = StateTransfer(gone=gone, same=same, dropped=() if same else saved.of_no_parameter)
    ever: dict[str, set[str]] = defaultdict(set)
    for name, keys in saved.keys.items():
        ever[saved.kind_of(name)].update(keys or ())
    for name, needed in live.keys.items():
        there, kind, before = set(saved.keys.get(name) or ()), live.kind_of(name), saved.kind_of(name)
        missing = set() if needed is None else set(needed) - there
        if name not in saved.keys:
            _begins_anew(found, name, needed, "has none")
        elif before and before != kind:
            _begins_anew(found, name, needed, f"is of {before}")
            if not needed and there:
                found.unused[_listed(there)].append(name)
        elif not missing:
            _takes(found, name, there, needed)
        elif not there and ever[before] >= missing:  # a parameter without a gradient so far
            continue
        elif there and missing <= BEGINS_AT_ZERO.get(kind, frozenset()):
            _takes(found, name, there, needed)
            found.zeros[name] = sorted(missing)
            found.anew[_listed(missing), "has none"].append(name)
        else:
            _begins_anew(found, name, needed, f"has no {_listed(missing)}" if there else "has none")
    return found


def _takes(found: StateTransfer, name: str, there: Collection[str], needed: Collection[str] | None) -> None:
    """Load the needed keys of a parameter."""
    kept = sorted(there if needed is None else set(there) & set(needed))
    if kept:
        found.keys[name] = kept
    if unused := set(there) - set(kept):
        found.unused[_listed(unused)].append(name)


def _begins_anew(found: StateTransfer, name: str, needed: Collection[str] | None, why: str) -> None:
    if needed is None or needed:
        found.anew["the state" if needed is None else _listed(needed), why].append(name)


def _listed(words: Collection[str]) -> str:
    *others, last = sorted(words)
    return f"{', '.join(others)} and {last}" if others else last


def named(names: Sequence[str], everything: Collection[str]) -> str:
    """The names of parameters in a sentence: the first ones of many; for all of them only their number."""
    if len(names) > 1 and len(names) == len(everything):
        return f"all {counted(len(names), 'parameter')}"
    shown = list(names[:MOST_NAMES])
    return _joined([*shown, f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else shown)


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
