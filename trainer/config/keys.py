"""Config keys: all that the schema declares, their values, the key of an override, the nearest key to a typo."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer.config import schema
from trainer.visible import one_line

SYNONYMS = {
    "gpu": "cuda",
    "double": "fp64",
    "float64": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "yes": "true",
    "no": "false",
}
WORDS = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping such as {a:1}",
}
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MEANT = {
    "train": "path",
    "train_path": "path",
    "files": "path",
    "file": "path",
    "val": "val_path",
    "val_files": "val_path",
}
"""Names of other projects for our keys."""
OF_OTHERS = {
    "logger": ("what metrics go to is the group tracking", "tracking=mlflow"),
    "trainer": (
        "what others give to a trainer object are keys of the run, such as epochs, device and launch.nproc",
        "epochs=N",
    ),
    "datamodule": ("the data are a group of their own", "data=OPTION"),
}
"""Groups of other projects: the difference, and what to type instead."""
NUMBER = re.compile(r"\d+")
LIMITS = ("ge", "gt", "le", "lt")
MOST = 10**12
"""The limit of whole numbers without another limit, so that products do not overflow."""
LONGEST_VALUE = 200
MOST_BITS = 4000
SHORT = {bool: "true|false", str: "text", int: "int", float: "float", list: "list", dict: "mapping"}


@dataclass(frozen=True)
class Key:
    """One documented config key: path, type, default, help, unit and what it accepts.

    Attributes:
        path: from the root, e.g. ``data.batch_size``.
        kind: bool, int, float, str, list or dict; None: any.
        optional: null is a value.
        unit: e.g. ``samples``; empty: none.
        rule: ``ge``, ``gt``, ``le`` (limits of a number or None) and ``choices``.
    """

    path: str
    kind: type | None
    optional: bool
    default: Any
    help: str
    unit: str
    rule: Mapping[str, Any]

    @property
    def choices(self) -> list[str]:
        """The words that this key accepts; empty if it accepts anything of its type."""
        return [spelled(choice) for choice in self.rule.get("choices") or ()]

    @property
    def type(self) -> str:
        """This key's type as ``--help`` prints it."""
        if self.rule.get("texts"):
            return "text or list" + (" or null" if self.optional else "")
        numbers = f"numbers|{named}" if (named := self.rule.get("or_word")) else ""
        word = "|".join(self.choices) or numbers or SHORT.get(self.kind, "any")  # type: ignore[arg-type]
        word = f"auto|{word}" if self.rule.get("or_auto") else word
        word = f"{word} or range" if self.rule.get("or_range") else word
        return f"{word} or null" if self.optional else word

    def refuse(self, value: Any) -> str:
        """Return why this key does not accept a value, as the rest of a sentence, or '' if it does."""
        if value is None:
            return "" if self.optional else f"must be {self._words()}, not null"
        if self.choices:
            if spelled(value).lower() in self.choices:
                return ""
            if spelled(value).lower() in self.rule.get("not_yet", ()):
                return f"is not there yet; must be one of {', '.join(self.choices)}"
            alone = f"this version has {self.choices[0]} alone"
            return f"must be one of {', '.join(self.choices)}" if len(self.choices) > 1 else alone
        if self.rule.get("texts"):
            several = value if isinstance(value, list) and value else [value]
            if not all(isinstance(v, str) for v in several):
                return "must be a text or a list of texts"
            return next(filter(None, map(_wrong_text, several)), "")
        if self.rule.get("or_auto") and value == "auto":
            return ""
        if self.rule.get("or_range") and isinstance(value, str):
            return self._wrong_range(value)
        if not self._has_type(value):
            return f"must be {self._words()}"
        if isinstance(value, str):
            return _wrong_text(value)
        if self.numbers and isinstance(value, list):
            return self._wrong_items(value)
        return self._out_of_range(value) if isinstance(value, (int, float)) else ""

    @property
    def numbers(self) -> bool:
        """Whether this key is a list of numbers (``data.transforms``, for example, is not)."""
        return self.kind is list and any(self.rule.get(name) is not None for name in LIMITS)

    def _wrong_items(self, values: list[Any]) -> str:
        """Why this key refuses a list of numbers: their count, or one of them."""
        length = self.rule.get("length")
        if length is not None and len(values) != length:
            return f"must be {length} numbers, not {len(values)}"
        if not values:
            return "must hold a number at least"
        whole = bool(self.default) and all(isinstance(v, int) for v in self.default)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                return f"holds {spelled(value)}, and each item must be {'a whole number' if whole else 'a number'}"
            if why := self._out_of_range(value):
                return f"holds {spelled(value)}, and each item {why}"
        return ""

    def instead(self, value: Any, usual: Any = None) -> str:
        """What to type for this key instead of a refused value; '' if nothing can be proposed.

        Args:
            usual: the value without the override, as from a recipe; None: the default.
        """
        usual = self.default if usual is None or self.refuse(usual) else usual
        if self.choices:
            words = {choice: choice for choice in self.choices}
            if "true" in words:
                words |= {word: spelled(truth) for word, truth in TRUTH.items()}
            return f"{self.path}={words.get(nearest(spelled(value).lower(), words), spelled(usual))}"
        if self.default == "???" and usual == self.default:
            return ""
        return f"{self.path}={spelled(self._example(value, usual))}"

    def _example(self, value: Any, usual: Any) -> Any:
        """An accepted value near to a refused one: the default, or the limit that was exceeded."""
        if self.kind is bool:
            return TRUTH.get(nearest(spelled(value).lower(), TRUTH), usual)
        if self.kind is int and (number := _whole(value)) is not None and not self.refuse(number):
            return number
        if self.rule.get("example") is not None:
            return self.rule["example"]
        ge, le = self.rule.get("ge"), self.rule.get("le")
        if usual is not None or (self.optional and ge is None):
            return usual
        too_large = le is not None and isinstance(value, (int, float)) and value > le
        return le if too_large else ge if ge is not None else self.default

    def _words(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = WORDS.get(self.kind, "a value")  # type: ignore[arg-type]
        words += f" of {self.unit}" if self.unit else ""
        words += ", or MIN:MAX of them" if self.rule.get("or_range") else ""
        return words + (", or auto" if self.rule.get("or_auto") else " or null" if self.optional else "")

    def _wrong_range(self, value: str) -> str:
        """Why a text is no range of whole numbers, such as 1:4."""
        ends = value.split(":")
        if len(ends) != 2 or not all(end.isascii() and end.isdecimal() for end in ends):
            return f"must be {self._words()}"
        least, most = map(int, ends)
        if least > most:
            return f"must be MIN:MAX, and {least} is more than {most}"
        return self._out_of_range(least) or self._out_of_range(most)

    def _has_type(self, value: Any) -> bool:
        if self.kind is None:
            return True
        if self.kind in (int, float) and isinstance(value, bool):
            return False
        accepted = {float: (int, float), dict: Mapping}.get(self.kind, self.kind)
        return isinstance(value, accepted)  # type: ignore[arg-type]

    def _out_of_range(self, value: float) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        ge, gt, le, lt = (self.rule.get(name) for name in LIMITS)
        if le is None and lt is None:
            le = MOST if isinstance(value, int) else None
        for limit, kept, words in (
            (ge, operator.ge, "at least"),
            (gt, operator.gt, "greater than"),
            (le, operator.le, "at most"),
            (lt, operator.lt, "less than"),
        ):
            if limit is not None and not kept(value, limit):
                return f"must be {words} {_number(limit)}{_units(self.unit, limit)}"
        return ""


@dataclass(frozen=True)
class Section:
    """A section of the docs' config reference: a config group ('' for the whole run), its title and its keys."""

    group: str
    title: str
    keys: tuple[Key, ...]


def sections() -> Iterator[Section]:
    """Yield all config keys in sections, each key once, as the docs' config reference lists them."""
    root = tuple(k for k in keys(schema.Config) if k.path not in schema.GROUPS)
    yield Section("", "the whole run", root)
    for group, classes in schema.GROUPS.items():
        for declared in classes:
            title = " ".join((declared.__doc__ or group).split())
            yield Section(group, title, tuple(keys(declared, f"{group}.", own=True)))


def keys(declared: type, prefix: str = "", own: bool = False) -> Iterator[Key]:
    """Every key of a schema class, nested ones with dotted paths; ``own=True`` leaves out inherited keys."""
    yield from _keys(declared, prefix, own)


@functools.cache
def _keys(declared: type, prefix: str, own: bool) -> tuple[Key, ...]:
    return tuple(_walk(declared, prefix, own))


def _walk(declared: type, prefix: str, own: bool) -> Iterator[Key]:
    hints = get_type_hints(declared)
    inherited = (
        {f.name: f for base in reversed(declared.__mro__[1:]) if is_dataclass(base) for f in fields(base)}
        if own
        else {}
    )
    for f in fields(declared):
        if f.name in inherited and inherited[f.name].default == f.default:
            continue
        if is_dataclass(hints[f.name]):
            yield from keys(hints[f.name], f"{prefix}{f.name}.")  # type: ignore[arg-type]
            continue
        default = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc, operator]
        kind, optional = _kind(hints[f.name])
        if f.metadata["or_auto"] or f.metadata["or_range"]:
            kind = list if f.metadata["length"] else int
        yield Key(prefix + f.name, kind, optional, default, f.metadata["help"], f.metadata["unit"], f.metadata)


def find(path: str) -> Key | None:
    """Find a config key by its path, in the first section that has it; None if there is none."""
    return next((key for section in sections() for key in section.keys if key.path == path), None)


def spelled(value: Any) -> str:
    """The value of a config key as a user types it (``null``, ``true``), in one line, cut if it is too long to read."""
    if isinstance(value, (list, tuple)):
        return _cut(f"[{','.join(spelled(v) for v in value)}]")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "a number of more than a thousand digits"
    return _cut(one_line(str(value)))


def _cut(written: str) -> str:
    return written if len(written) <= LONGEST_VALUE else f"{written[:LONGEST_VALUE]}..."


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known key or option nearest to a mistyped word, or a synonym of it; '' if none is near."""
    known = list(known)
    if SYNONYMS.get(word) in known:
        return SYNONYMS[word]
    return (difflib.get_close_matches(word, known, 1, cutoff) or [""])[0]


def nearest_option(name: str, options: Iterable[str]) -> str:
    """The option or recipe that a name is meant for; '' if none is: it may be one of the user's own.

    It is meant for one that is almost the same (``lenett``), or of which alone it is a word (``async`` of
    ``pserver_async``). Other numbers (``cifar100``) or words more than an option has (``my_lenet``) are another thing.
    """
    options = list(options)
    if SYNONYMS.get(name) in options:
        return SYNONYMS[name]
    with_this_word = [option for option in options if f"_{name}_" in f"_{option}_"]
    if len(with_this_word) > 1:
        return ""
    for option in difflib.get_close_matches(name, options, 5, 0.75):
        same_numbers = NUMBER.findall(name) in ([], NUMBER.findall(option))
        if same_numbers and f"_{option}_" not in f"_{name}_" and _alike(name, option):
            return option
    return "".join(with_this_word)


def nearest_key(path: str, known: Iterable[str], value: Any = None) -> str:
    """The known config key nearest to a mistyped path; '' if none is near.
    The same name elsewhere in the run comes first, then a similar name beside it, then a similar last part anywhere.

    Args:
        value: which the key must accept; None: any.
    """
    known = [key for key in known if value is None or _takes(key, value)]
    parent, _, leaf = path.rpartition(".")
    if leaf in known:
        return leaf
    for pool, cutoff in (([k for k in known if k.rpartition(".")[0] == parent], 0.6), (known, 0.75)):
        leaves = {k.rpartition(".")[2]: k for k in reversed(pool)}
        if leaf in leaves or SYNONYMS.get(leaf) in leaves:
            return leaves.get(leaf) or leaves[SYNONYMS[leaf]]
        for found in difflib.get_close_matches(leaf, leaves, 5, cutoff):
            if _alike(leaf, found):
                return leaves[found]
    return ""


def _takes(path: str, value: Any) -> bool:
    """Whether the config key ``path`` accepts a value in any section."""
    declared = [key for section in sections() for key in section.keys if key.path == path]
    return not declared or any(not key.refuse(_as_hydra(key, value)) for key in declared)


def _as_hydra(key: Key, value: Any) -> Any:
    """A value as OmegaConf converts it for a key: numbers become texts, 1 and yes become true."""
    if key.kind is bool:
        return {"1": True, "0": False, **TRUTH}.get(str(value).lower(), value)
    return str(value) if key.kind is str and isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _alike(name: str, other: str) -> bool:
    """Whether two names are alike without their common first and last words: image_size is not like batch_size."""
    parts, theirs = name.split("_"), other.split("_")
    while parts and theirs and parts[-1] == theirs[-1]:
        parts, theirs = parts[:-1], theirs[:-1]
    while parts and theirs and parts[0] == theirs[0]:
        parts, theirs = parts[1:], theirs[1:]
    return not parts or not theirs or difflib.SequenceMatcher(None, "_".join(parts), "_".join(theirs)).ratio() >= 0.5


def _whole(value: Any) -> int | None:
    """A text or float such as 1e3 as a whole number; None if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None


def _kind(hint: Any) -> tuple[type | None, bool]:
    args = [a for a in get_args(hint) if a is not type(None)]
    if get_origin(hint) is Union and len(args) == 1:
        return _kind(args[0])[0], True
    origin = get_origin(hint) or hint
    return (origin if origin in SHORT else None), False


def _wrong_text(value: str) -> str:
    """Why a text is refused: it is empty, or has control characters; '' if it is accepted."""
    if not value.strip():
        return "must not be empty"
    control = next((c for c in value if unicodedata.category(c) == "Cc"), "")
    return f"holds the control character {one_line(control)}" if control else ""


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


ENDINGS = ("sses", "ches", "shes", "xes")
"""Endings of plurals with ``es``."""


def _units(unit: str, number: float) -> str:
    """The unit after a number: `` samples``, `` sample`` for one, or nothing."""
    if number == 1:
        unit = unit[:-2] if unit.endswith(ENDINGS) else unit.removesuffix("s")
    return f" {unit}" if unit else ""


def every_key() -> list[str]:
    """All config keys that any option declares, to find the nearest to a mistyped one."""
    return [key.path for section in sections() for key in section.keys]


def leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested config, each with its dotted key."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{name}", value


def is_of(key: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of ``groups``, or in one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def key_of(override: str) -> str:
    """The config key that an override sets: ``+optimizer.lr=0.1`` gives ``optimizer.lr``, and ``db@data.x=3``
    ``db``."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]
