"""What is never written or shown: one collector of secret values, and one redactor of texts and configs.

A value is secret because of where it stands: under a key that sounds so, in a mapping or list under such a key, in an
address (user, password, query), in ``pwd=...``, in ``Authorization: ...``. There it is always hidden. Wherever else it
stands it is hidden too, unless it is so short or so plain that it would be found in texts that have nothing to do with it.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import functools
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from trainer.secret_keys import PLAIN, WORDS, means_secret, sounds_secret
from trainer.visible import one_line, visible

HIDDEN = "(hidden)"
LEAST = 3
"""Shorter values are not looked for in texts: they would be found everywhere."""
LEAST_OF_WEAK = 5
INSIDE_WORDS = 8
"""Shorter values are looked for as words of their own."""

NOT_SECRET_VARIABLES = ("PWD", "OLDPWD")

HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie2?|x-[\w-]{0,40}(?:key|token|auth|secret|signature))(\s*:\s*)([^\r\n'\"]+)")  # fmt: skip
SCHEME_OF_LOGIN = re.compile(r"(?i)\b(bearer|basic|negotiate)(\s+)([A-Za-z0-9._~+/=-]{6,})")
URI = re.compile(r"(?<=[a-zA-Z0-9+.-])(://)([^\s'\"<>`]+)")
WHOLE_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)(.+)", re.DOTALL)
NAMED = re.compile(r"(?<![\w./@-])([+~]{0,2})([A-Za-z_][\w./@-]*)([\"']?)=(?=\S)|(?<![\w./-])([\"'])([A-Za-z_][\w./@ -]*)\4\s*:\s*(?=\S)")  # fmt: skip
LINE = re.compile(r"(?m)^([ \t]*(?:- )?)([A-Za-z_][\w.-]*)(:[ \t]+)(\S[^\n]*)$")
INSIDE = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(:\s*)('[^'\n]*'|\"[^\"\n]*\"|[^\s,:{}\[\]'\"][^,{}\[\]\n]*)")
FLOW = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]*)[\"']?\s*:\s*(?=[\[{])")
BARE = re.compile(r"[^\s,&;\"'`{}\[\]()<>]+(?:,(?![\w./-]*=)[^\s,&;=\"'`{}\[\]()<>]+)*")
QUOTED = re.compile(r"'(?:\\.|''|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"")
QUOTED_OR_ESCAPED = re.compile(rf"\\.|{QUOTED.pattern}")
"""An escaped quote begins nothing: from each one the search would go on to the end of the text."""
MEASURED = re.compile(r"\(.*|\d{0,4}(?:[.,]\d+)*%?(?:[ \t]+(?:[A-Za-z/%]+|\d+(?:[.,]\d+)*)[.,;]?)*", re.DOTALL)
"""``12,345 in 3 s``, and the arguments of a function: what stands after ``tokens:`` or ``Signature:`` in a text of many words."""
COUNTS = re.compile(r"(?i)tokens\d*$")
FROM_ELSEWHERE = re.compile(r"\$\{[\w.:]+\}")
"""Where a value is taken from, as ``${oc.env:HF_TOKEN}``: tells nothing."""
VARIABLE = re.compile(r"\$\{oc\.env:\s*['\"]?(\w+)['\"]?\s*(?:,\s*([^}]{0,2000}))?\}")
OPTIONS_OF_ADDRESSES = (
    "timeout", "connect_timeout", "sslmode", "charset", "mode", "cache", "driver", "application_name", "format",
    "version", "v", "page", "encoding", "region", "uri", "workflowtype",
)  # fmt: skip


def is_secret(key: str, value: Any) -> bool:
    """Whether the value of that key is to be hidden: texts and what holds them; numbers, if they are long or the key means nothing else."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _from_elsewhere(value)):
        return False
    if isinstance(value, (str, Mapping, list, tuple)):
        return bool(value) and sounds_secret(key)
    return means_secret(key) or (isinstance(value, int) and _long_number(key, str(value)))


def _long_number(key: str, value: str) -> bool:
    """Whether that is a number that a key such as ``token`` or ``otp`` protects, and no measurement."""
    return value.isdecimal() and len(value) >= LEAST_OF_WEAK and sounds_secret(key) and not COUNTS.search(key)


def _from_elsewhere(value: str) -> bool:
    return not value or value == HIDDEN or FROM_ELSEWHERE.fullmatch(value) is not None


# -- the collector ---------------------------------------------------------------------------------------------------


def values(node: Any) -> set[str]:
    """All secret values of a config (or of one text), as texts; those among them that can be looked for in any text."""
    return set(_taught(_found(node)))


def of_command_line(argv: Iterable[str]) -> set[str]:
    """The secret values of what was typed, whether or not it can be read."""
    found = set()
    for word in argv:
        key, equals, value = word.lstrip("+~-").partition("=")
        name = re.split(r"[./@]", key)[-1]
        if equals and sounds_secret(name):
            strong = means_secret(name)
            found |= set(_taught((piece, strong) for piece in _pieces(value)))
        found |= values(word) | set(_taught((v, True) for v in _variables(name, value)))
    return found


def of_environment(variables: Mapping[str, str]) -> set[str]:
    """The secret values among the variables of the environment."""
    return values({k: v for k, v in variables.items() if k not in NOT_SECRET_VARIABLES})


def _pieces(value: str) -> Iterator[str]:
    """A value as it was typed, and as it is meant: without quotes and brackets, one by one, less the keys of mappings."""
    yield value
    yield from (found[0][1:-1].replace("\\", "") for found in QUOTED_OR_ESCAPED.finditer(value) if found[0][0] != "\\")
    yield value.strip("'\"").replace("\\", "")
    if value[:1] in ("{", "[") or "," in value:
        for piece in re.split(r"[,{}\[\]]", re.sub(r"\b_target_['\"]?\s*:[^,{}\[\]]*", "", value)):
            yield re.sub(r"^\s*['\"]?[\w.-]+['\"]?\s*:\s*", "", piece).strip(" '\"")


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
    if value.lower() in WORDS or value == HIDDEN or _from_elsewhere(value):
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
        for part in _parts(node):
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


# -- where secrets stand in a text -----------------------------------------------------------------------------------


class _Part:
    """From where to where a text is hidden, and the values in there."""

    def __init__(self, start: int, end: int, *found: tuple[str, bool]) -> None:
        self.start, self.end, self.values = start, end, [v for v in found if v[0]]


def _parts(text: str) -> Iterator[_Part]:
    """The secret parts of a text; they may overlap."""
    whole = WHOLE_URI.match(text)
    for uri in (*([whole] if whole else []), *URI.finditer(text)):
        yield from _of_uri(uri)
    for found in HEADER.finditer(text):
        login = found[3].rstrip("]} ")
        several = [(field.partition("=")[2], False) for field in login.split(";")]
        if "cookie" in found[1].lower() and "=" not in login and (" " in login or not _random(login)):
            continue  # a class of pictures
        yield _Part(
            found.start(3), found.start(3) + len(login), (login, True), (login.rpartition(" ")[2], True), *several
        )
    for found in SCHEME_OF_LOGIN.finditer(text):
        if not _random(found[3]):
            continue
        yield _Part(found.start(3), found.end(3), (found[3], False))
    done, first = 0, len(text) - len(text.lstrip())
    for found in NAMED.finditer(text):
        name = re.split(r"[./@]", found[2] or found[5])[-1]
        if found.end() >= done and sounds_secret(name):
            for part in _of_named(text, found, name, found.start() <= first):
                done = part.end
                yield part
    done = 0
    for found in FLOW.finditer(text):
        if found.end() >= done and sounds_secret(found[1]):
            end, strong = _end(text, found.end()), means_secret(found[1])
            done = end
            yield _Part(found.end(), end, *((piece, strong) for piece in _pieces(text[found.end() : end])))
    for found in (*LINE.finditer(text), *_in_braces(text)):
        value = found[4].strip().strip("'\"")
        if (
            is_secret(found[2], value)
            and (means_secret(found[2]) or _long_number(found[2], value) or not MEASURED.fullmatch(value))
            and value.lower() not in WORDS
        ):
            yield _Part(found.start(4), found.end(4), (value, means_secret(found[2])))


def _random(word: str) -> bool:
    """Whether a word after ``basic`` is no word of a sentence, as ``training`` or ``augmentation_2x``."""
    mixed = any(len(part) >= 6 and re.search(r"\d", part) and re.search(r"[A-Za-z]", part) for part in re.split(r"[_./-]", word))  # fmt: skip
    mixed = mixed or word.endswith("=") or re.search(r"[a-z][A-Z]\w*[a-z][A-Z]", word) is not None
    parts = re.split(r"[_./-]", word)
    words = len(parts) > 1 and all(re.fullmatch(r"[a-z]+|[a-z0-9]{1,3}", part) for part in parts)
    return mixed or (len(word) >= 16 and not words)


def _in_braces(text: str) -> Iterator[re.Match[str]]:
    """``name: value`` inside of ``{...}``."""
    depth, done = 0, 0
    for found in INSIDE.finditer(text):
        depth += text.count("{", done, found.end(1)) - text.count("}", done, found.end(1))
        done = found.end(1)
        if depth > 0:
            yield found


def _of_named(text: str, found: re.Match[str], name: str, first: bool) -> Iterator[_Part]:
    """``name=value`` and ``"name": value``: what stands there up to where it ends; ``first``: nothing is before it."""
    start, strong = found.end(), means_secret(name)
    before = text[found.start() - 1] if found.start() else ""
    if text.startswith(HIDDEN, start):
        return
    if found[2] is not None and first:  # the whole text is an override, or a field of one
        end = len(text) if "\n" not in text and not re.search(r"[\s;&][\w.]+=", text[start:]) else _end(text, start)
    elif (
        found[2] is not None
        and before in ("'", '"')
        and (closing := text.find(before, start + (text[start] == before))) > 0
    ):
        end = closing
    else:
        end = _end(text, start)
    value = text[start:end]
    bare = value.strip("'\"")
    if bare.lower().rstrip(".") in WORDS or text.startswith("$(", start) or _from_elsewhere(bare) or end <= start:
        return
    if not strong and (
        (re.fullmatch(r"[\d.,e\s\[\]-]+", bare) and not _long_number(name, bare))
        or (name == "key" and PLAIN.fullmatch(bare))
    ):
        return
    yield _Part(start, end, *((v, strong) for v in dict.fromkeys(_pieces(value))))


def _end(text: str, start: int) -> int:
    """Where a value that begins there ends: its closing quote or bracket, or what cannot be of it."""
    if quoted := QUOTED.match(text, start):
        return quoted.end()
    if text[start] in "{[":
        depth = 0
        for place in range(start, len(text)):
            depth += (text[place] in "{[") - (text[place] in "}]")
            if depth == 0:
                return place + 1
        return len(text)
    bare = BARE.match(text, start)
    return bare.end() if bare else start


def _of_uri(found: re.Match[str]) -> Iterator[_Part]:
    """User and password, and the values of the query."""
    start, rest = found.start(2), found[2]
    address, mark, query = rest.partition("?")
    if "@" in query and "@" not in address and "/" not in address and ":" in address:  # a password with ? in it
        address, mark, query = rest, "", ""
    login = _login(address)
    if login and login != HIDDEN:
        user, colon, password = login.partition(":")
        known = [(password, True), (unquote(password), True)] if colon else []
        known += [
            (piece, False) for piece in re.split(r"[/?#@:]", password)
        ]  # as who cannot read the address quotes it
        if not colon or re.search(r"\d", user) or len(user) >= 12:
            known += [(user, False), (unquote(user), False)]
        pair = base64.b64encode(unquote(login).encode("utf-8", "surrogateescape")).decode()
        yield _Part(start, start + len(login), *known, (pair, True))
    place = start + len(address) + len(mark)
    for field in re.split(r"([&;#])", query):
        name, equals, value = field.partition("=")
        kept = name.lower() in OPTIONS_OF_ADDRESSES or value.lower() in WORDS or re.fullmatch(r"\d{1,4}", value)
        if value and not value.startswith(HIDDEN) and (means_secret(name) or not kept) and not _from_elsewhere(value):
            strong = sounds_secret(name)
            begin = place + len(name) + len(equals)
            yield _Part(begin, place + len(field), (value, strong), (unquote_plus(value), strong))
        place += len(field)


def _login(address: str) -> str:
    """What stands before the host's @; a password may hold a slash."""
    if address.startswith("/") or "@" not in address:
        return ""
    first = address.partition("/")[0]
    if "@" not in first and (":" not in first or re.fullmatch(r"[\w.-]*:\d*|\[[\da-fA-F:]+\](?::\d+)?", first)):
        return ""  # host, or host:port, and an @ in the path
    if ":" in address.partition("@")[0]:
        return address.rpartition("@")[0]
    return first.rpartition("@")[0]


# -- the redactor ----------------------------------------------------------------------------------------------------


class Known:
    """The secret values that this process knows of, hidden in everything that it prints, writes and sends."""

    def __init__(self) -> None:
        self.values: frozenset[str] = frozenset()

    def learn(self, *found: Iterable[str]) -> None:
        """Know these as well."""
        self.values = self.values.union(*found)

    @contextlib.contextmanager
    def for_now(self) -> Iterator[None]:
        """Forget at the end what was learnt inside."""
        before = self.values
        try:
            yield
        finally:
            self.values = before


HERE = Known()
"""Of this process. Its streams are its own as well, and a print somewhere in it has nobody to ask for them."""


def hide(node: Any, known: Iterable[str] = ()) -> Any:
    """The same with every secret value hidden, and those that are known wherever else they stand.

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
    return node if node is None or isinstance(node, bool) or (isinstance(node, str) and _from_elsewhere(node)) else HIDDEN  # fmt: skip


def without(line: str, known: Iterable[str] = ()) -> str:
    """A text without the known values, whatever else is in it: for names of files and keys."""
    pattern = _pattern(frozenset(known) | HERE.values)
    return pattern.sub(HIDDEN, line) if pattern else line


def text(line: str, known: Iterable[str] = ()) -> str:
    """A text without the known values, without logins of addresses, and without ``password=...`` of any kind."""
    return starred(line, lambda hidden: HIDDEN, frozenset(known) | HERE.values)


def starred(line: str, instead: Callable[[str], str], known: Iterable[str] | None = None) -> str:
    """A text with something else in place of every secret part."""
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
    for start, end in sorted((part.start, part.end) for part in _parts(line)):
        if apart and start < apart[-1][1]:
            before = apart.pop()
            start, end = before[0], max(before[1], end)
        apart.append((start, end))
    return apart


def command(overrides: Iterable[str], known: Iterable[str] = ()) -> str:
    """Overrides as one types them into a shell, without what is secret."""
    known, safe = frozenset(known), "hidden__here"
    hidden = (text(override, known).replace(HIDDEN, safe) for override in overrides)
    return " ".join(shlex.quote(override).replace(safe, HIDDEN) for override in hidden)


def begun(line: str) -> int:
    """How many characters at the end of a text may be the beginning of a known value."""
    known, longest = _sorted(HERE.values)
    for start in range(max(0, len(line) - longest), len(line)):
        tail = line[start:]
        place = bisect.bisect_right(known, tail)
        if place < len(known) and known[place].startswith(tail):
            return len(tail)
    return 0


@functools.lru_cache(maxsize=4)
def _sorted(known: frozenset[str]) -> tuple[list[str], int]:
    found = sorted({spelling for value in known for spelling in spellings(value)})
    return found, max(map(len, found), default=1) - 1


@functools.lru_cache(maxsize=64)
def _pattern(known: frozenset[str]) -> re.Pattern[str] | None:
    """Finds each value as it is, and as JSON, YAML, a shell, Hydra, an address or CSV spell it."""
    found = {spelling for value in known for spelling in spellings(value)}
    if not found:
        return None
    return re.compile("|".join(_bounded(value) for value in sorted(found, key=lambda v: (-len(v), v))))


def _bounded(value: str) -> str:
    whole = re.escape(value)
    return whole if len(value) >= INSIDE_WORDS else rf"(?<!\w){whole}(?!\w)"


def spellings(value: str) -> set[str]:
    """How a value may stand in a text: as it is, escaped once or twice, and the parts of it that tell enough."""
    if len(value) < LEAST:
        return set()
    once = {value, *_escaped(value)}
    parts = {part for part in re.split(r"\W+", value) if len(part) >= INSIDE_WORDS and not PLAIN.fullmatch(part)}
    return once | {again for spelling in once - {value} for again in _escaped(spelling)} | parts


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
    return lower | other | {
        ascii(value)[1:-1], value.encode("unicode_escape").decode(), repr(value.encode("utf-8", "surrogateescape"))[2:-1],
        json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], visible(value), one_line(value),
        quote(clean), quote(clean, safe=""), quote_plus(clean), value.replace("'", "''"), value.replace("'", "'\"'\"'"),
        value.replace("'", "\\'"), value.replace('"', '""'), value.replace('"', '\\"'),
    }  # fmt: skip


def scrub(folder: Path, patterns: Iterable[str], known: Iterable[str]) -> None:
    """Hide the known values in files that others wrote, such as what a library in another language put into a log."""
    pattern = _pattern(frozenset(known))
    for path in (path for glob in patterns for path in folder.glob(glob) if pattern and path.is_file()):
        before = path.read_bytes().decode("utf-8", "surrogateescape")
        after = pattern.sub(HIDDEN, before) if pattern else before
        if after != before:
            path.write_bytes(after.encode("utf-8", "surrogateescape"))
