"""Collects secret values, and redacts them from all texts and configs that are printed, written or sent.

A value is secret because of where it stands: under a key that sounds so, in a mapping or list under such a key, in an
address (user, password, query), in ``pwd=...``, in ``Authorization: ...``. There it is always hidden. Wherever else it
stands it is hidden too, unless it is so short or so plain that it would be found in texts that have nothing to do with
it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from trainer.config.secret_keys import PLAIN, TELLS_NOTHING, means_secret, sounds_secret
from trainer.config.secret_parts import HIDDEN, LEAST_OF_WEAK, from_elsewhere, is_secret, parts
from trainer.visible import one_line, visible
from trainer.wording import quoted

LEAST = 3
"""Shorter values are not looked for in texts: they would be found everywhere."""
INSIDE_WORDS = 8
"""Shorter values are looked for as words of their own."""
NOT_SECRET_VARIABLES = ("PWD", "OLDPWD")
VARIABLE = re.compile(r"\$\{oc\.env:\s*['\"]?(\w+)['\"]?\s*(?:,\s*([^}]{0,2000}))?\}")


# -- the collector ---------------------------------------------------------------------------------------------------


def values(node: Any) -> set[str]:
    """Collect the secret values of a config or text: those that are distinctive enough to be looked for in any text."""
    return set(_taught(_found(node)))


def of_command_line(argv: Iterable[str]) -> set[str]:
    """Collect the secret values to redact from the typed arguments, even if these cannot be parsed."""
    found = set()
    for word in argv:
        key, _, value = word.lstrip("+~-").partition("=")
        name = re.split(r"[./@]", key)[-1]
        found |= values({name: value}) | values(word)
    return found


def of_environment(variables: Mapping[str, str]) -> set[str]:
    """Collect the secret values among the environment variables; the place of a file that is there, as SSH_AUTH_SOCK,
    is none."""
    return values({k: v for k, v in variables.items() if k not in NOT_SECRET_VARIABLES and not _is_place(v)})


def _is_place(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)


def _taught(found: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """What can be looked for; each line of a value is one, since it may be all that is printed at once."""
    for value, strong in found:
        if _telling(value, strong):
            yield value
            for line in map(str.strip, value.splitlines() if "\n" in value else ()):
                if _telling(line, strong) and len(re.findall(r"\w", line)) >= LEAST:
                    yield line


def _telling(value: str, strong: bool) -> bool:
    """Whether a value can be looked for in any text: it is not found where nobody means it."""
    if value.lower() in TELLS_NOTHING or value == HIDDEN or from_elsewhere(value):
        return False
    if value.isdecimal() and len(value) < LEAST_OF_WEAK:
        return False
    if strong:
        return len(value) >= LEAST
    return len(value) >= LEAST_OF_WEAK and (len(value) >= 12 or PLAIN.fullmatch(value) is None)


def _found(node: Any) -> Iterator[tuple[str, bool]]:
    """Secret values, and whether the key says so beyond doubt."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if is_secret(str(key), value):
                yield from ((leaf, means_secret(str(key))) for leaf in _leaves(value))
            if isinstance(value, str):
                yield from ((v, True) for v in _variables(str(key), value))
            yield from _found(value)
    elif isinstance(node, (list, tuple, set)):
        for value in node:
            yield from _found(value)
    elif isinstance(node, str):
        for part in parts(node):
            yield from part.values


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for value in (value for key, value in node.items() if key != "_target_"):
            yield from _leaves(value)
    elif isinstance(node, (list, tuple, set)):
        for value in node:
            yield from _leaves(value)
    elif node is not None and not isinstance(node, bool):
        yield str(node)
        yield str(node).strip()


def _variables(key: str, value: str) -> Iterator[str]:
    """What ``${oc.env:NAME,default}`` stands for where the key or the variable sounds secret."""
    for name, default in VARIABLE.findall(value):
        if sounds_secret(key) or sounds_secret(name):
            yield from (v for v in (os.environ.get(name, ""), default.strip(" '\"")) if v)


# -- the redactor ----------------------------------------------------------------------------------------------------


class Known:
    """The secret values that this process knows, and hides in everything that it prints, writes and sends."""

    def __init__(self) -> None:
        self.values: frozenset[str] = frozenset()

    def learn(self, *found: Iterable[str]) -> None:
        """Add secret values to those that this process hides."""
        self.values = self.values.union(*found)

    @contextlib.contextmanager
    def for_now(self) -> Iterator[None]:
        """Context manager: secret values learnt inside it are forgotten at its end."""
        before = self.values
        try:
            yield
        finally:
            self.values = before


HERE = Known()
"""Of this process. Its streams are its own as well, and a print somewhere in it has nobody to ask for them."""


def hide(node: Any, known: Iterable[str] = ()) -> Any:
    """Return a config or other nested data with every secret value redacted, wherever else that value occurs in it.

    Args:
        known: from :func:`values` of the whole config; what this process knows is hidden as well.
    """
    return _hide(node, frozenset(known) | HERE.values)


def _hide(node: Any, known: frozenset[str]) -> Any:
    if isinstance(node, Mapping):
        return {_key(k, known): _cover(v, known) if is_secret(str(k), v) else _hide(v, known) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_hide(value, known) for value in node]
    return text(node, known) if isinstance(node, str) else node


def _key(key: Any, known: frozenset[str]) -> Any:
    """A key without known values; a plain word stays, since it may be one of ours."""
    return key if not isinstance(key, str) or PLAIN.fullmatch(key) else without(key, known)


def _cover(node: Any, known: frozenset[str]) -> Any:
    """Every leaf hidden; a mapping keeps its keys, which say what was there."""
    if isinstance(node, Mapping):
        return {_key(k, known): _cover(v, known) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_cover(value, known) for value in node]
    return (
        node if node is None or isinstance(node, bool) or (isinstance(node, str) and from_elsewhere(node)) else HIDDEN
    )


def without(line: str, known: Iterable[str] = ()) -> str:
    """Redact the known secret values from a text and change nothing else: for names of files and keys."""
    pattern = _pattern(frozenset(known) | HERE.values)
    return pattern.sub(HIDDEN, line) if pattern else line


def text(line: str, known: Iterable[str] = ()) -> str:
    """Redact known secret values, logins in addresses, and ``password=...`` of any kind from a text."""
    return starred(line, lambda hidden: HIDDEN, frozenset(known) | HERE.values)


def starred(line: str, instead: Callable[[str], str], known: Iterable[str] | None = None) -> str:
    """Replace each secret in a text by what the function ``instead`` returns for it."""
    pattern = _pattern(HERE.values if known is None else frozenset(known))
    if pattern:
        line = pattern.sub(lambda found: instead(found[0]), line)
    shown, done = [], 0
    for start, end in _spans(line):
        shown += [line[done:start], instead(line[start:end])]
        done = end
    return "".join([*shown, line[done:]])


def _spans(line: str) -> list[tuple[int, int]]:
    """The secret parts, in order, those that overlap as one."""
    apart: list[tuple[int, int]] = []
    for start, end in sorted((part.start, part.end) for part in parts(line)):
        if apart and start < apart[-1][1]:
            before = apart.pop()
            start, end = before[0], max(before[1], end)
        apart.append((start, end))
    return apart


def command(overrides: Iterable[str], known: Iterable[str] = ()) -> str:
    """Join overrides into one shell command line as a user types it (``resume=auto``), with the secrets redacted."""
    known, safe = frozenset(known), "hidden__here"
    typed = (re.sub(r"^resume\.path=", "resume=", override) for override in overrides)
    hidden = (text(override, known).replace(HIDDEN, safe) for override in typed)
    return " ".join(quoted(override).replace(safe, HIDDEN) for override in hidden)


def begun(line: str) -> int:
    """How many characters at the end of a text could be the beginning of a known secret."""
    known, longest = _sorted(HERE.values)
    for start in range(max(0, len(line) - longest), len(line)):
        tail = line[start:]
        place = bisect.bisect_right(known, tail)
        if place < len(known) and known[place].startswith(tail):
            return len(tail)
    return 0


@functools.lru_cache(maxsize=4)
def _sorted(known: frozenset[str]) -> tuple[list[str], int]:
    found = sorted({spelling for value in known for spelling in _spellings(value)})
    return found, max(map(len, found), default=1) - 1


@functools.lru_cache(maxsize=64)
def _pattern(known: frozenset[str]) -> re.Pattern[str] | None:
    """Finds each value as it is, and as JSON, YAML, a shell, Hydra, an address or CSV spell it."""
    found = {spelling for value in known for spelling in _spellings(value)}
    if not found:
        return None
    return re.compile("|".join(_bounded(value) for value in sorted(found, key=lambda v: (-len(v), v))))


def _bounded(value: str) -> str:
    whole = re.escape(value)
    return whole if len(value) >= INSIDE_WORDS else rf"(?<!\w){whole}(?!\w)"


def _spellings(value: str) -> set[str]:
    """The spellings under which a secret is redacted: as it is, escaped once or twice, and its distinctive parts."""
    if len(value) < LEAST:
        return set()
    once = {value, *_escaped(value)}
    halves = {part for part in re.split(r"\W+", value) if len(part) >= INSIDE_WORDS and not PLAIN.fullmatch(part)}
    return once | {again for spelling in once - {value} for again in _escaped(spelling)} | halves


def _escaped(value: str) -> set[str]:
    """As JSON, Python, an address, YAML, a shell, Hydra and CSV spell it, and as control characters are shown."""
    if value.isalnum() and value.isascii():
        return set()
    clean = value.encode("utf-8", "replace").decode()
    lower = {
        re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), quoted)
        for quoted in (quote(clean), quote(clean, safe=""), quote_plus(clean))
    }
    other = {unicodedata.normalize(form, value) for form in ("NFC", "NFD")}
    return (
        lower
        | other
        | {
            ascii(value)[1:-1],
            value.encode("unicode_escape").decode(),
            repr(value.encode("utf-8", "surrogateescape"))[2:-1],
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
            visible(value),
            one_line(value),
            quote(clean),
            quote(clean, safe=""),
            quote_plus(clean),
            value.replace("'", "''"),
            value.replace("'", "'\"'\"'"),
            value.replace("'", "\\'"),
            value.replace('"', '""'),
            value.replace('"', '\\"'),
        }
    )


def scrub(folder: Path, patterns: Iterable[str], known: Iterable[str]) -> None:
    """Cover the known values with stars in files that others wrote, such as logs of a library in another language.

    Each star stands in the place of a byte, so a process that still writes to the end of the file loses nothing.
    """
    pattern = _pattern(frozenset(known))
    for path in (path for glob in patterns for path in folder.glob(glob) if pattern and path.is_file()):
        with path.open("rb") as file:
            content = file.read().decode("utf-8", "surrogateescape")
            if pattern and (found := [hit.span() for hit in pattern.finditer(content)]):
                _cover_in_place(path, os.fstat(file.fileno()), content, found)


def _cover_in_place(path: Path, read: os.stat_result, content: str, spans: Iterable[tuple[int, int]]) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        if not os.path.samestat(os.fstat(file), read):  # a new life has begun a new one
            return
        done = place = 0
        for start, end in spans:
            place += _bytes(content[done:start])
            os.pwrite(file, b"*" * _bytes(content[start:end]), place)
            place, done = place + _bytes(content[start:end]), end
    finally:
        os.close(file)


def _bytes(piece: str) -> int:
    return len(piece.encode("utf-8", "surrogateescape"))
