"""What an optimizer takes over of another one's state, by parameter name, when a run resumes with another config.

:func:`carry` decides for the plan, which lists what begins anew, and for the workers and servers that load the state.
This module imports no torch.
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
"""Buffers that an option of torch's optimizers adds (amsgrad, momentum, centered). They begin at zero whenever they
begin."""
BETWEEN = " + "
MOST_NAMES = 20


@dataclass(frozen=True)
class KeptState:
    """What an optimizer keeps of each parameter.

    Attributes:
        kind: the class's name, e.g. ``Adam``; of dense parameters and tables ``Adam + SparseAdam``.
        keys: by parameter name; None: only an update can tell, and it could not be tried.
        tables: names of the parameters that are updated by rows.
        of_no_parameter: names of what an optimizer of one's own keeps beside the state of its parameters.
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
class Carried:
    """What is taken over of the saved state, by parameter name.

    Attributes:
        keys: that are taken over. zeros: buffers that begin at zero beside them.
        anew: what begins anew: the keys, and why; the names of the parameters. unused: keys that are dropped.
        gone: parameters with a saved state that are not trained any more.
        same: the saved state is of the same class and parameters, so that what is of no parameter is taken over, too.
        dropped: names of what is of no parameter, where it is not.
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


def carry(saved: KeptState, live: KeptState) -> Carried:
    """Decide what an optimizer takes over of a saved state; the state of the same parameter and class, never of another
    one.

    Args:
        saved: its ``keys`` are those that are there, none of a parameter that never had a gradient.
        live: its ``keys`` are those that the optimizer needs.
    """
    gone = [name for name, keys in saved.keys.items() if keys and name not in live.keys]
    same = saved.kind == live.kind and list(saved.keys) == list(live.keys)
    found = Carried(gone=gone, same=same, dropped=() if same else saved.of_no_parameter)
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
        elif not there and ever[before] >= missing:  # a parameter without a gradient so far, as before
            continue
        elif there and missing <= BEGINS_AT_ZERO.get(kind, frozenset()):
            _takes(found, name, there, needed)
            found.zeros[name] = sorted(missing)
            found.anew[_listed(missing), "has none"].append(name)
        else:
            _begins_anew(found, name, needed, f"has no {_listed(missing)}" if there else "has none")
    return found


def _takes(found: Carried, name: str, there: Collection[str], needed: Collection[str] | None) -> None:
    """The saved keys of a parameter that are needed."""
    kept = sorted(there if needed is None else set(there) & set(needed))
    if kept:
        found.keys[name] = kept
    if unused := set(there) - set(kept):
        found.unused[_listed(unused)].append(name)


def _begins_anew(found: Carried, name: str, needed: Collection[str] | None, why: str) -> None:
    if needed is None or needed:
        found.anew["the state" if needed is None else _listed(needed), why].append(name)


def _listed(words: Collection[str]) -> str:
    *others, last = sorted(words)
    return f"{', '.join(others)} and {last}" if others else last


def named(names: Sequence[str], everything: Collection[str]) -> str:
    """The names of parameters in a sentence; of all of them their number, of very many the first ones."""
    if len(names) > 1 and len(names) == len(everything):
        return f"all {counted(len(names), 'parameter')}"
    shown = list(names[:MOST_NAMES])
    return _joined([*shown, f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else shown)


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
