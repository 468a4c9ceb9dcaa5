"""Collects secret values, and redacts them from all texts and configs that are printed, written or sent.

A value is secret by its place: under a secret key (:mod:`trainer.config.secret_keys`), or in a secret part of a text
(:mod:`trainer.config.secret_parts`). There it is always hidden. Anywhere else it is hidden too, unless it is so short
or so plain that it occurs in unrelated texts.
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

from trainer.config.secret_keys import leaves, means_secret, sounds_secret
from trainer.config.secret_parts import HIDDEN, LEAST_OF_WEAK, PLAIN, TELLS_NOTHING, from_elsewhere, is_secret, parts
from trainer.visible import one_line, visible
from trainer.wording import quoted

LEAST = 3
"""Fewest characters of a value that is looked for in texts."""
INSIDE_WORDS = 8
"""Fewest characters of a value that is also looked for inside of words."""
VARIABLE = re.compile(r"\$\{oc\.env:\s*['\"]?(\w+)['\"]?\s*(?:,\s*([^}]{0,2000}))?\}")


def values(node: Any) -> set[str]:
    """Collect the secret values of a config or text that can be looked for in any text."""
    found = set[str]()
    for value, strong in _found(node):
        lines = (line.strip() for line in value.splitlines() if len(re.findall(r"\w", line)) >= LEAST)
        found |= {one for one in (value, *lines) if _is_distinctive(one, strong)}
    return found


def of_command_line(argv: Iterable[str]) -> set[str]:
    """Collect the secret values of typed arguments, even if these cannot be parsed."""
    found = set[str]()
    for word in argv:
        key, _, value = word.lstrip("+~-").partition("=")
        found |= values({re.split(r"[./@]", key)[-1]: value}) | values(word)
    return found


def of_environment(variables: Mapping[str, str]) -> set[str]:
    """Collect the secret values among environment variables; paths that exist (SSH_AUTH_SOCK) are none."""
    own = {key: value for key, value in variables.items() if key not in ("PWD", "OLDPWD")}
    return values({key: value for key, value in own.items() if not (value.startswith("/") and os.path.exists(value))})


def _is_distinctive(value: str, strong: bool) -> bool:
    """Whether a value occurs in no unrelated text."""
    if value.lower() in TELLS_NOTHING or from_elsewhere(value):
        return False
    if value.isdecimal() and len(value) < LEAST_OF_WEAK:
        return False
    if strong:
        return len(value) >= LEAST
    return len(value) >= LEAST_OF_WEAK and (len(value) >= 12 or PLAIN.fullmatch(value) is None)


def _found(node: Any) -> Iterator[tuple[str, bool]]:
    """Secret values, each with whether its key is strong."""
    if isinstance(node, Mapping):
        for key, value in ((str(key), value) for key, value in node.items()):
            if is_secret(key, value):
                yield from ((leaf, means_secret(key)) for leaf in leaves(value))
            for name, default in VARIABLE.findall(value) if isinstance(value, str) else ():
                if sounds_secret(key) or sounds_secret(name):
                    yield from ((one, True) for one in (os.environ.get(name, ""), default.strip(" '\"")))
            yield from _found(value)
    elif isinstance(node, (list, tuple, set)):
        for value in node:
            yield from _found(value)
    elif isinstance(node, str):
        for part in parts(node):
            yield from part.values


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
"""The secrets of this process, for its streams and for code that nobody hands them to."""


def hide(node: Any, known: Iterable[str] = ()) -> Any:
    """Return a config or other nested data with every secret value redacted, wherever else that value occurs in it.

    Args:
        known: from :func:`values` of the whole config; secrets that this process knows are hidden as well.
    """
    return _hidden(node, frozenset(known) | HERE.values)


def _hidden(node: Any, known: frozenset[str], secret: bool = False) -> Any:
    """The node without known values; ``secret``: every leaf is hidden. Plain words stay as keys: they may be ours."""
    if isinstance(node, Mapping):
        keys = {k: without(k, known) if isinstance(k, str) and not PLAIN.fullmatch(k) else k for k in node}
        return {keys[k]: _hidden(v, known, secret or is_secret(str(k), v)) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_hidden(value, known, secret) for value in node]
    if secret:
        shown = node is None or isinstance(node, bool) or (isinstance(node, str) and from_elsewhere(node))
        return node if shown else HIDDEN
    return text(node, known) if isinstance(node, str) else node


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
    spans: list[list[int]] = []  # those that overlap are one
    for start, end in sorted((part.start, part.end) for part in parts(line)):
        if spans and start < spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([start, end])
    begins = [0, *(end for _, end in spans)]
    shown = [line[begin:start] + instead(line[start:end]) for begin, (start, end) in zip(begins, spans, strict=False)]
    return "".join([*shown, line[begins[-1] :]])


def command(overrides: Iterable[str], known: Iterable[str] = ()) -> str:
    """Join overrides into one shell command line as a user types it (``resume=auto``), with the secrets redacted."""
    known, safe = frozenset(known), "hidden__here"
    typed = (re.sub(r"^resume\.path=", "resume=", override) for override in overrides)
    hidden = (text(override, known).replace(HIDDEN, safe) for override in typed)
    return " ".join(quoted(override).replace(safe, HIDDEN) for override in hidden)


def begun(line: str) -> int:
    """How many characters at the end of a text could be the beginning of a known secret."""
    known = _sorted(HERE.values)
    for start in range(max(0, len(line) + 1 - max(map(len, known), default=1)), len(line)):
        place = bisect.bisect_right(known, line[start:])
        if place < len(known) and known[place].startswith(line[start:]):
            return len(line) - start
    return 0


@functools.lru_cache(maxsize=64)
def _sorted(known: frozenset[str]) -> list[str]:
    return sorted({spelling for value in known for spelling in _spellings(value)})


@functools.lru_cache(maxsize=64)
def _pattern(known: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern that finds each value in all its spellings, longer ones first; short ones as words of their own."""
    found = sorted(_sorted(known), key=lambda value: (-len(value), value))
    escaped = (rf"{re.escape(v)}" if len(v) >= INSIDE_WORDS else rf"(?<!\w){re.escape(v)}(?!\w)" for v in found)
    return re.compile("|".join(escaped)) if found else None


def _spellings(value: str) -> set[str]:
    """The spellings of a secret: as it is, escaped once or twice, and its distinctive words."""
    if len(value) < LEAST:
        return set()
    once = _escaped(value)
    words = {word for word in re.split(r"\W+", value) if len(word) >= INSIDE_WORDS and not PLAIN.fullmatch(word)}
    return {value, *once, *words, *(twice for spelling in once - {value} for twice in _escaped(spelling))}


def _escaped(value: str) -> set[str]:
    """A value as JSON, Python, addresses, YAML, shells, Hydra and CSV spell it, and with visible control characters."""
    if value.isalnum() and value.isascii():
        return set()
    clean = value.encode("utf-8", "replace").decode()
    urls = {quote(clean), quote(clean, safe=""), quote_plus(clean)}
    urls |= {re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), url) for url in urls}
    python = {ascii(value)[1:-1], repr(value)[1:-1], value.encode("unicode_escape").decode()}
    python |= {repr(value.encode("utf-8", "surrogateescape"))[2:-1]}
    quotes = [("'", "''"), ("'", "'\"'\"'"), ("'", "\\'"), ('"', '""'), ('"', '\\"')]
    other = {value.replace(*pair) for pair in quotes} | {unicodedata.normalize(f, value) for f in ("NFC", "NFD")}
    other |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], visible(value), one_line(value)}
    return urls | python | other


def scrub(folder: Path, patterns: Iterable[str], known: Iterable[str]) -> None:
    """Cover the known values with stars in files of other writers, such as logs of a library in another language.

    A star replaces each byte in its place, so a process that still appends to the file loses nothing.
    """
    if (pattern := _pattern(frozenset(known))) is None:
        return
    of_bytes = re.compile(pattern.pattern.encode("utf-8", "surrogateescape"))
    for path in (path for glob in patterns for path in folder.glob(glob) if path.is_file()):
        with path.open("r+b", buffering=0) as file:
            for found in of_bytes.finditer(file.readall()):
                os.pwrite(file.fileno(), b"*" * len(found[0]), found.start())
