"""Finds the tensors of a model in checkpoints of other trainers: the key, the prefix, and what is skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from trainer.errors import UserError
from trainer.visible import one_line, shortened
from trainer.weights.torch_files import Skipped, whole_model

KEYS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "module", "params")
"""Keys of the model in checkpoints, the most usual one first."""
AVERAGED = re.compile(r"(^|[._])(ema|avg|averaged?|swa|shadow|teacher|momentum)([._]|$)|_k$|_ema$|^ema_", re.IGNORECASE)
"""Keys of averaged copies of the model, used if there is no other."""
OTHER_STATE = re.compile(r"optim|sched|scaler|rng|random|callback|loop|criterion|loss", re.IGNORECASE)
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))
"""Parts of names that compilers and wrappers add."""
DEEPEST, LONGEST_PREFIX = 3, 6
MOST_NAMED = 4
T = TypeVar("T")


@dataclass(frozen=True)
class StateDict:
    """The named tensors of a file.

    Attributes:
        said: the part of the file that is used, and what is skipped, for the plan; empty: all of it is used.
    """

    tensors: dict[str, torch.Tensor]
    said: str = ""


def find_state_dict(content: Any, what: str) -> StateDict:
    """Find the state_dict in the content of a file of ``torch.save``, under any key.

    Args:
        what: the key and value that named the file.

    Raises:
        UserError: there is none, there are several candidates, or the file holds a whole model.
    """
    found = dict(_inside(content, ())) if isinstance(content, Mapping) else {}
    if not found and isinstance(content, Mapping) and any(isinstance(v, torch.Tensor) for v in content.values()):
        found = {(): content}
    if not found:
        raise _none(content, what)
    best, others = _first(found, what)
    state = found[best]
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    said = [f"its {'.'.join(best)}"] if best else []
    if others:
        said.append(f"{some_names(others)} {'is' if len(others) == 1 else 'are'} not used")
    skipped = [f"{n} ({v.kind})" for part in (content, state) for n, v in part.items() if isinstance(v, Skipped)]
    if skipped := list(dict.fromkeys(skipped)):
        said.append(f"skipped: {some_names(skipped)}")
    if strange := [str(n) for n, v in state.items() if not isinstance(v, (torch.Tensor, Skipped))]:
        said.append(f"no tensors: {some_names(strange)}")
    return StateDict(tensors, "; ".join(said))


def _inside(node: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """The state_dicts inside a checkpoint, by the keys that lead there; not those of optimizers and the like."""
    for key, value in node.items():
        if not isinstance(key, str) or not isinstance(value, Mapping) or OTHER_STATE.search(key):
            continue
        tensors = sum(isinstance(one, torch.Tensor) for one in value.values())
        if tensors and 2 * tensors >= len(value) and all(isinstance(name, str) for name in value):
            yield (*path, key), value
        elif len(path) + 1 < DEEPEST:
            yield from _inside(value, (*path, key))


def _first(found: Mapping[tuple[str, ...], Any], what: str) -> tuple[tuple[str, ...], list[str]]:
    """The keys of the model among several state_dicts, and the names of the others.

    Raises:
        UserError: several could be the model.
    """

    def rank(keys: tuple[str, ...]) -> int:
        if any(AVERAGED.search(key) for key in keys):
            return len(KEYS) + 1
        return min((KEYS.index(key) for key in keys if key in KEYS), default=len(KEYS))

    ranked = sorted(found, key=rank)
    same = [keys for keys in ranked if rank(keys) == rank(ranked[0])]
    if len(same) > 1:
        chosen = "".join(f"[{key!r}]" for key in same[0])
        raise UserError(
            what,
            f"holds several state_dicts ({some_names(['.'.join(keys) for keys in same])})",
            f"the file of one: torch.save(torch.load(FILE){chosen}, 'weights.pth')",
        )
    return ranked[0], [".".join(keys) for keys in ranked[1:]]


def _none(content: Any, what: str) -> UserError:
    if model := whole_model(content):
        return model.refusal(what)
    kind = (
        f"holds {some_names(content)}" if isinstance(content, Mapping) and content else f"is a {type(content).__name__}"
    )
    arrays = isinstance(content, Mapping) and any(
        isinstance(v, Skipped) and "numpy" in v.kind for v in content.values()
    )
    why = f"{kind} and {'arrays of numpy, ' if arrays else ''}no state_dict, name -> tensor"
    return UserError(what, why, "torch.save(model.state_dict(), ...)")


def some_names(names: Any) -> str:
    """The first few of many names, and how many more there are, on one line."""
    listed = [shortened(one_line(str(name))) for name in names]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more


@dataclass(frozen=True)
class Renamed(Generic[T]):
    """A file's tensors under the model's own names.

    Attributes:
        prefix: removed from the names. outside: names without it, which are of other parts than the model.
    """

    tensors: dict[str, T]
    prefix: str = ""
    outside: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The removed prefix and the unused tensors in words, for the plan."""
        parts = [f"names without {self.prefix}."] if self.prefix else []
        return "; ".join([*parts, *([f"not of the model: {some_names(self.outside)}"] if self.outside else [])])


def renamed(by_name: Mapping[str, T], own: Container[str], what: str) -> Renamed[T]:
    """Rename a file's tensors to the model's own names: without wrappers, and without the prefix that fits most names.

    Raises:
        UserError: the file holds the model several times, with different prefixes.
    """
    bare = {}
    for name, one in by_name.items():
        unwrapped = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        bare[name if name in own else unwrapped] = one
    if not (fits := _fits(bare, own)):
        return Renamed(bare)
    most = max(fits.values())
    prefixes = [prefix for prefix, count in fits.items() if count == most]
    if "" in prefixes:
        return Renamed(bare)
    plain = [prefix for prefix in prefixes if not AVERAGED.search(prefix)] or prefixes
    if len(plain) > 1 and most > 1:
        raise UserError(
            what,
            f"holds the model {len(plain)} times: names begin with {some_names(f'{p}.' for p in plain)}",
            "a file of one of them",
        )
    prefix = plain[0]
    inside = {name.removeprefix(f"{prefix}."): one for name, one in bare.items() if name.startswith(f"{prefix}.")}
    outside = tuple(name for name in bare if not name.startswith(f"{prefix}."))
    return Renamed(inside, prefix, outside)


def _fits(names: Mapping[str, Any], own: Container[str]) -> Counter[str]:
    """How many names are the model's without a prefix, by prefix."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".", LONGEST_PREFIX)
        counts.update(".".join(parts[:n]) for n in range(len(parts)) if ".".join(parts[n:]) in own)
    return counts
