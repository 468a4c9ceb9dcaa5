"""Finds the secrets in a text: in addresses, in headers, by the shape of a token, and in fields with a name.

The one filter is :func:`parts`. Its time grows with the length of the text, whatever the text is: other programs write
it, and it is on its way to the screen.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_plus

from trainer.config.secret_keys import means_secret, sounds_secret

HIDDEN = "(hidden)"
LEAST_OF_WEAK = 5
"""Fewest characters of a value that is secret by a weak word alone."""
PLAIN = re.compile(r"[A-Z]?[a-z]*(?:[_./-][a-z]+)*\d?")
"""A word or two, as ``image`` or ``val/acc1``."""
TELLS_NOTHING = (
    *("", "none", "null", "true", "false", "auto", "default", "yes", "no", "on", "off", "ok"),
    *("env", "value", "name", "path", "text", "option", "folder", "file", "another"),
)
"""Values that are no secret under any key."""
FROM_ELSEWHERE = re.compile(r"\$\{[\w.:]+\}")
"""A reference, as ``${oc.env:HF_TOKEN}``."""
HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie2?|x-[\w-]{0,40}(?:key|token|auth|secret|signature))"
    r"(\s*:\s*)([^\r\n'\"]+)"
)
SCHEME_OF_LOGIN = re.compile(r"(?i)\b(bearer|basic|negotiate)(\s+)([A-Za-z0-9._~+/=-]{6,})")
TOKEN = re.compile(
    r"(?<![\w-])(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,60}\d)[\w-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|gsk_[A-Za-z0-9]{16,}"
    r"|r8_[A-Za-z0-9]{20,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}"
    r"|pypi-[\w-]{30,}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
    r"|(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/-]+|(?<=/api/webhooks/)\d+/[\w-]{20,}"
)
"""Tokens with a shape of their own (GitHub, GitLab, Hugging Face, OpenAI, Stripe, Groq, Replicate, Slack, AWS, Google,
npm, PyPI, Databricks, JWTs), and the paths of webhooks of Slack and Discord."""
URI = re.compile(r"(?<=[a-zA-Z0-9+.-])(://)([^\s'\"<>`]+)")
WHOLE_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)(.+)", re.DOTALL)
OPTIONS_OF_ADDRESSES = (
    *("timeout", "connect_timeout", "sslmode", "charset", "mode", "cache", "driver", "application_name", "format"),
    *("version", "v", "page", "encoding", "region", "uri", "workflowtype", "viewstatesharekey"),
)
FIELD = re.compile(
    r"(?<![\w./@-])(?P<sign>[+~]{1,2}|--?)?(?P<name>[A-Za-z_][\w./@-]*+)"
    r"(?:[\"']?(?:(?P<equals>=)|(?P<colon>\s*+:\s*+))(?=\S)|(?(sign)[ \t]++(?=[^-\s])|(?!)))"
    r"|(?<![\w./-])(?P<quote>[\"'])(?P<quoted>[A-Za-z_][\w./@ -]*+)(?P=quote)\s*+:\s*(?=\S)"
)
"""``name=value``, ``name: value``, ``"name": value`` and ``--name value``, up to the value."""
LINE = re.compile(r"[^\n]*")
INSIDE = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|[^\s,:{}\[\]'\"][^,{}\[\]\n]*")
BARE = re.compile(r"[^\s,&;\"'`{}\[\]()<>]+(?:,(?![\w./-]*=)[^\s,&;=\"'`{}\[\]()<>]+)*")
QUOTED = re.compile(r"'(?:\\.|''|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"")
QUOTED_OR_ESCAPED = re.compile(rf"\\.|{QUOTED.pattern}")
"""An escaped quote begins nothing, so that no search goes on from it to the end of the text."""
MEASURED = re.compile(r"\(.*|\d{0,4}(?:[.,]\d+)*%?(?:[ \t]+(?:[A-Za-z/%]+|\d+(?:[.,]\d+)*)[.,;]?)*", re.DOTALL)
"""``12,345 in 3 s``, and arguments of a function: values after ``tokens:`` or ``Signature:`` in prose."""
NUMBERS = re.compile(r"[\d.,e\s\[\]-]+")


class SecretPart(NamedTuple):
    """A secret part of a text.

    Attributes:
        start, end: its place. values: the secret values in it; each with whether its key is strong.
    """

    start: int
    end: int
    values: list[tuple[str, bool]]


def is_secret(key: str, value: Any) -> bool:
    """Whether a config value must be hidden, by its key: texts and lists; numbers only if long or plainly secret."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and from_elsewhere(value)):
        return False
    if isinstance(value, (str, Mapping, list, tuple)):
        return bool(value) and sounds_secret(key, value)
    return means_secret(key) or (isinstance(value, int) and _long_number(key, str(value)))


def _long_number(key: str, value: str) -> bool:
    """Whether a value is a number like one that a ``token`` or ``otp`` is, and no count such as of ``tokens``."""
    counts = re.search(r"(?i)tokens\d*$", key)
    return value.isdecimal() and len(value) >= LEAST_OF_WEAK and not counts and sounds_secret(key)


def from_elsewhere(value: str) -> bool:
    """Whether a value is empty, hidden, or a reference such as ``${oc.env:NAME}``."""
    return not value or value == HIDDEN or FROM_ELSEWHERE.fullmatch(value) is not None


def parts(text: str) -> Iterator[SecretPart]:
    """Yield the secret parts of a text; they may overlap."""
    whole = WHOLE_URI.match(text)
    for uri in (*([whole] if whole else []), *URI.finditer(text)):
        yield from _of_uri(uri)
    for found in HEADER.finditer(text):
        login = found[3].rstrip("]} ")
        if "cookie" in found[1].lower() and "=" not in login and (" " in login or not _is_login(login)):
            continue  # a class of pictures
        cookies = [(field.partition("=")[2], False) for field in login.split(";")]
        yield _part(found.start(3), login, (login, True), (login.rpartition(" ")[2], True), *cookies)
    for found in SCHEME_OF_LOGIN.finditer(text):
        if _is_login(found[3]):
            yield _part(found.start(3), found[3], (found[3], False))
    for found in TOKEN.finditer(text):
        yield _part(found.start(), found[0], (found[0], True))
    yield from _fields(text)


def _part(start: int, part: str, *values: tuple[str, bool]) -> SecretPart:
    return SecretPart(start, start + len(part), [value for value in values if value[0]])


def _is_login(word: str) -> bool:
    """Whether a word after ``basic`` is a login, and no word of a sentence, as ``training`` or ``augmentation_2x``."""
    syllables = re.split(r"[_./-]", word)
    mixed = any(len(part) >= 6 and re.search(r"\d", part) and re.search(r"[A-Za-z]", part) for part in syllables)
    if mixed or word.endswith("=") or re.search(r"[a-z][A-Z]\w*[a-z][A-Z]", word):
        return True
    words = len(syllables) > 1 and all(re.fullmatch(r"[a-z]+|[a-z0-9]{1,3}", part) for part in syllables)
    return len(word) >= 16 and not words


def _fields(text: str) -> Iterator[SecretPart]:
    """The values of secret fields. Lists are not read again inside of lists, nor values inside of values, so that the
    time stays linear."""
    done = done_lists = at = depth = line_start = 0
    first = len(text) - len(text.lstrip())
    for found in FIELD.finditer(text):
        place, start, (_, plain_name, equals, colon, _, quoted_name) = found.start(), found.end(), found.groups()
        depth += text.count("{", at, place) - text.count("}", at, place)
        line_start, at = text.rfind("\n", at, place) + 1 or line_start, place
        name = re.split(r"[./@]", plain_name or quoted_name)[-1]
        in_brackets = not equals and text[start] in "[{"
        glimpse = text[start : start + 100] if in_brackets else _glimpse(text, start)
        if start < (done_lists if in_brackets else done) or not sounds_secret(name, glimpse):
            continue
        if (equals or quoted_name) and text.startswith("$(", start):  # the output of a command
            continue
        strong, kind, before = means_secret(name), "=", text[max(0, place - 50) : place].rstrip()
        if equals:
            end = _end_of_override(text, place, start, place <= first)
        elif in_brackets or quoted_name:
            end, kind = _end(text, start), "[" if in_brackets else "="
        elif colon is None:
            end, kind, strong = _end(text, start), "--", strong or name.lower().endswith(("-pass", "_pass"))
        elif text[line_start:place][:200].strip(" \t") in ("", "-") and re.fullmatch(r":[ \t]+", colon):
            end, kind = LINE.match(text, start).end(), ":"  # type: ignore[union-attr]
        elif depth > 0 and before.endswith(("{", ",")) and (inside := INSIDE.match(text, start)):
            end, kind = inside.end(), ":"
        else:
            continue
        value = text[start:end]
        if value and _protects(name, value, strong, kind):
            done, done_lists = (done, end) if in_brackets else (end, done_lists)
            values = [value.strip().strip("'\"")] if kind == ":" else list(dict.fromkeys(_pieces(value)))
            yield _part(start, value, *((piece, strong) for piece in values))


def _protects(name: str, value: str, strong: bool, kind: str) -> bool:
    """Whether the value of a secret field protects anything.

    Args:
        kind: of the field: ``=``, ``:``, ``--`` (a flag), or ``[`` (a list or mapping).
    """
    bare = value.strip().strip("'\"")
    if kind == "[":
        return re.search(r"\w", value) is not None
    word = bare.lower() if kind == ":" else bare.lower().rstrip(".")
    if kind != "--" and (word in TELLS_NOTHING or from_elsewhere(bare) or bare.startswith(HIDDEN)):
        return False
    if strong or _long_number(name, bare):
        return True
    if kind == "=":
        return not NUMBERS.fullmatch(bare) and not (name == "key" and PLAIN.fullmatch(bare))
    return not MEASURED.fullmatch(bare) and not (kind == "--" and PLAIN.fullmatch(bare))


def _pieces(value: str) -> Iterator[str]:
    """Split a secret value into what can leak of it: as typed, without quotes and brackets, and element by element."""
    yield value
    yield from (found[0][1:-1].replace("\\", "") for found in QUOTED_OR_ESCAPED.finditer(value) if found[0][0] != "\\")
    yield value.strip("'\"").replace("\\", "")
    if value[:1] in ("{", "[") or "," in value:
        for piece in re.split(r"[,{}\[\]]", re.sub(r"\b_target_['\"]?\s*:[^,{}\[\]]*", "", value)):
            yield re.sub(r"^\s*['\"]?[\w.-]+['\"]?\s*:\s*", "", piece).strip(" '\"")


def _glimpse(text: str, start: int) -> str:
    """The first 100 characters of a value: enough to see whether it is random."""
    found = QUOTED.match(text, start, start + 100) or BARE.match(text, start, start + 100)
    return found[0] if found else ""


def _end_of_override(text: str, place: int, start: int, whole: bool) -> int:
    """Where the value of ``name=value`` ends; ``whole``: nothing is before it, so that the text may be one override."""
    if whole and "\n" not in text and not re.search(r"[\s;&][\w.]+=", text[start:]):
        return len(text)
    before = text[place - 1] if place and not whole else ""
    closing = text.find(before, start + (text[start] == before)) if before in ("'", '"') else -1
    return closing if closing > 0 else _end(text, start)


def _end(text: str, start: int) -> int:
    """Where a value ends: at its closing quote or bracket, or before a character that no bare value has."""
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


def _of_uri(found: re.Match[str]) -> Iterator[SecretPart]:
    """The user and password of an address, and the values of its query."""
    start, rest = found.start(2), found[2]
    address, mark, query = rest.partition("?")
    if "@" in query and "@" not in address and "/" not in address and ":" in address:  # a password with ? in it
        address, mark, query = rest, "", ""
    login = _login(address)
    if login and login != HIDDEN:
        user, colon, password = login.partition(":")
        known = [(password, True), (unquote(password), True)] if colon else []
        known += [(piece, False) for piece in re.split(r"[/?#@:]", password)]  # as errors quote a bad address
        if not colon or re.search(r"\d", user) or len(user) >= 12:
            known += [(user, False), (unquote(user), False)]
        basic = base64.b64encode(unquote(login).encode("utf-8", "surrogateescape")).decode()
        yield _part(start, login, *known, (basic, True))
    place = start + len(address) + len(mark)
    for field in re.split(r"([&;#])", query):
        name, equals, value = field.partition("=")
        kept = name.lower() in OPTIONS_OF_ADDRESSES or value.lower() in TELLS_NOTHING or re.fullmatch(r"\d{1,4}", value)
        if not value.startswith(HIDDEN) and (means_secret(name) or not kept) and not from_elsewhere(value):
            strong = sounds_secret(name)
            yield _part(place + len(name) + len(equals), value, (value, strong), (unquote_plus(value), strong))
        place += len(field)


def _login(address: str) -> str:
    """The text before the host's @; a password may hold a slash."""
    if address.startswith("/") or "@" not in address:
        return ""
    first = address.partition("/")[0]
    if "@" not in first and (":" not in first or re.fullmatch(r"[\w.-]*:\d*|\[[\da-fA-F:]+\](?::\d+)?", first)):
        return ""  # host, or host:port, and an @ in the path
    return (address if ":" in address.partition("@")[0] else first).rpartition("@")[0]
