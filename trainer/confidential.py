"""What is never written or shown: passwords, tokens and keys in a config, and who logs in with an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
ALWAYS = r"passw(?:or)?d|passphrase|pwd|secret|credentials?|api_?key|access_?key|private_?key"
AT_THE_END = r"token|key|auth|authorization|signature"
SECRET_KEY = re.compile(rf"(?:.*(?:^|[_.-])(?:{ALWAYS})(?:[_.-].*)?|(?:.*[_.-])?(?:{AT_THE_END}))$", re.IGNORECASE)
LOGIN = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s'\"]+@")
OVERRIDE = re.compile(r"(?<![\w./-])([+~]*[A-Za-z_][\w./@-]*)=('[^']*'|\"[^\"]*\"|[^,&\s\"'}\]]+)")
LEAST = 3
"""Shorter values are not looked for in texts: they would be found everywhere."""


def sounds_secret(key: str) -> bool:
    """Whether a key (the last part of a path) is called as one whose value is nobody's business."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower()
    return SECRET_KEY.match(words) is not None


def is_secret(key: str, value: Any) -> bool:
    """Whether the value of that key is to be hidden: texts, and numbers of keys that can be nothing else."""
    if value is None or value == "" or isinstance(value, (bool, Mapping)):
        return False
    if isinstance(value, str):
        return sounds_secret(key)
    return sounds_secret(key) and re.search(ALWAYS, str(key), re.IGNORECASE) is not None


def values(node: Any) -> set[str]:
    """All secret values of a config, as texts."""
    return set(_values(node))


def _values(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if is_secret(str(key), value):
                yield from (str(v) for v in (value if isinstance(value, list) else [value]))
            else:
                yield from _values(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _values(value)
    elif isinstance(node, str):
        for login in LOGIN.finditer(node):
            _, _, password = login[0].rpartition("://")[2].removesuffix("@").partition(":")
            if password:
                yield password


def hide(node: Any, known: Iterable[str] = ()) -> Any:
    """The same with every secret value hidden, and those that are known wherever else they stand.

    Args:
        known: from :func:`values` of the whole config.
    """
    known = sorted(known, key=len, reverse=True)
    if isinstance(node, Mapping):
        return {k: HIDDEN if is_secret(str(k), v) else hide(v, known) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [hide(value, known) for value in node]
    return text(node, known) if isinstance(node, str) else node


def text(line: str, known: Iterable[str] = ()) -> str:
    """A text without the known values, without logins of addresses, and without ``password=...`` of any kind."""
    for value in known:
        if len(value) >= LEAST:
            line = line.replace(value, HIDDEN)
    line = LOGIN.sub(rf"\1{HIDDEN}@", line)
    return OVERRIDE.sub(lambda found: f"{found[1]}={HIDDEN}" if _named(found) else found[0], line)


def _named(found: re.Match[str]) -> bool:
    name = re.split(r"[./]", found[1].lstrip("+~"))[-1]
    return found[2] not in ("null", HIDDEN) and is_secret(name, found[2])


def scrub(folder: Path, patterns: Iterable[str], known: Iterable[str]) -> None:
    """Hide the known values in files that others wrote, such as a worker's log with an error of a user's own class."""
    known = [value for value in known if len(value) >= LEAST]
    for path in (path for pattern in patterns for path in folder.glob(pattern) if known):
        before = path.read_bytes()
        after = before
        for value in sorted(known, key=len, reverse=True):
            after = after.replace(value.encode(), HIDDEN.encode())
        if after != before:
            path.write_bytes(after)
