"""Wording of messages: 1 worker, 2 workers; 1.3 GB; a, b and 3 more; words quoted for a shell and for Hydra; the kind
of a value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

MOST_NAMED = 5
IRREGULAR = {"batch": "batches", "class": "classes", "process": "processes", "entry": "entries", "matrix": "matrices"}


def counted(number: int, thing: str, form: str = "") -> str:
    """A number and its noun: ``1 epoch``, ``0 epochs``, ``2 batches``; of several words the last is inflected.

    Args:
        form: how the number is written, as of ``format``: ``,`` groups thousands.
    """
    head, gap, last = thing.rpartition(" ")
    return f"{number:{form}} {head}{gap}{last if number == 1 else IRREGULAR.get(last, f'{last}s')}"


def sized(count: float) -> str:
    """A number of bytes, such as ``1.3 GB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count:.0f} B"


def since(seconds: float) -> str:
    """A time that has gone by, such as ``5 min``."""
    for unit, least in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= least:
            return f"{seconds / least:.0f} {unit}"
    return f"{seconds:.0f} s"


def some(said: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    more = [f"and {len(said) - MOST_NAMED} more"] if len(said) > MOST_NAMED else []
    return "; ".join([*said[:MOST_NAMED], *more])


def kind(value: Any) -> str:
    """Describe a value in a sentence: ``None``, ``the class X``, ``something of type X``."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"something of type {type(value).__name__}"


def quoted(word: str) -> str:
    """Quote a word for a shell, in double quotes if it contains single ones, as a user would type it."""
    plain = "'" in word and not set(word) & set('"$`\\!\n')
    return f'"{word}"' if plain else shlex.quote(word)


def literal(text: str) -> str:
    r"""Escape a text as a value of a config: ``${`` would be read as an interpolation, and ``\${`` is not."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def override(key: str, text: str) -> str:
    r"""Return the override ``key=text``; the text is in single quotes where Hydra would read it otherwise.

    In quotes a backslash counts only before a quote and before ``${``, so there it is doubled.
    """
    if re.fullmatch(r"[\w/.:@%+-]+", text, re.ASCII) and not text.isdecimal():
        return f"{key}={text}"
    inside = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal(text))
    return f"{key}='{inside}'"


def typed(key: str, value: object) -> str:
    """``key=value`` as it is typed in a shell: quoted for Hydra, and that for the shell, where it is needed."""
    return quoted(override(key, str(value)))
