"""Finds the secrets in a text: in addresses, in headers, in ``name=value`` and in ``name: value``.

Everything here takes time in proportion to the text, whatever it is: others write it, and it is on its way to the
    screen.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, unquote_plus

from trainer.config.secret_keys import PLAIN, TELLS_NOTHING, means_secret, sounds_secret

HIDDEN = "(hidden)"
LEAST_OF_WEAK = 5
LONGEST_GLIMPSE = 100

HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie2?|x-[\w-]{0,40}(?:key|token|auth|secret|signature))(\s*:\s*)([^\r\n'\"]+)"
)
SCHEME_OF_LOGIN = re.compile(r"(?i)\b(bearer|basic|negotiate)(\s+)([A-Za-z0-9._~+/=-]{6,})")
TOKEN = re.compile(
    r"(?<![\w-])(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,60}\d)[\w-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|gsk_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{20,}|xox[abeoprs]-[\w-]{10,}|"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{30,}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)|"
    r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/-]+|(?<=/api/webhooks/)\d+/[\w-]{20,}"
)
"""Tokens that say by themselves what they are: of GitHub, GitLab, Hugging Face, OpenAI and its like, Stripe, Groq,
Replicate, Slack, AWS, Google, npm, PyPI, Databricks, JWTs, and the paths of webhooks of Slack and Discord."""
FLAG = re.compile(r"(?<![\w-])--?([A-Za-z][\w-]*)[ \t]+(?=[^-\s])")
"""A flag of a command and its value: ``--password X``."""
URI = re.compile(r"(?<=[a-zA-Z0-9+.-])(://)([^\s'\"<>`]+)")
WHOLE_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)(.+)", re.DOTALL)
NAMED = re.compile(
    r"(?<![\w./@-])([+~]{0,2}|--?)([A-Za-z_][\w./@-]*)([\"']?)=(?=\S)|(?<![\w./-])([\"'])([A-Za-z_][\w./@ "
    r"-]*)\4\s*:\s*(?=\S)"
)
LINE = re.compile(r"(?m)^([ \t]*(?:- )?)([A-Za-z_][\w.-]*)(:[ \t]+)(\S[^\n]*)$")
INSIDE = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(:\s*)('[^'\n]*'|\"[^\"\n]*\"|[^\s,:{}\[\]'\"][^,{}\[\]\n]*)")
FLOW = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]*)[\"']?\s*:\s*(?=[\[{])")
BARE = re.compile(r"[^\s,&;\"'`{}\[\]()<>]+(?:,(?![\w./-]*=)[^\s,&;=\"'`{}\[\]()<>]+)*")
QUOTED = re.compile(r"'(?:\\.|''|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"")
QUOTED_OR_ESCAPED = re.compile(rf"\\.|{QUOTED.pattern}")
"""An escaped quote begins nothing: from each one the search would go on to the end of the text."""
MEASURED = re.compile(r"\(.*|\d{0,4}(?:[.,]\d+)*%?(?:[ \t]+(?:[A-Za-z/%]+|\d+(?:[.,]\d+)*)[.,;]?)*", re.DOTALL)
"""``12,345 in 3 s``, and the arguments of a function: what stands after ``tokens:`` or ``Signature:`` in a text of many
words."""
COUNTS = re.compile(r"(?i)tokens\d*$")
FROM_ELSEWHERE = re.compile(r"\$\{[\w.:]+\}")
"""Where a value is taken from, as ``${oc.env:HF_TOKEN}``: tells nothing."""
OPTIONS_OF_ADDRESSES = (
    "timeout",
    "connect_timeout",
    "sslmode",
    "charset",
    "mode",
    "cache",
    "driver",
    "application_name",
    "format",
    "version",
    "v",
    "page",
    "encoding",
    "region",
    "uri",
    "workflowtype",
    "viewstatesharekey",
)


def is_secret(key: str, value: Any) -> bool:
    """Whether a config value must be hidden, by its key: texts and lists; numbers only if long or plainly secret."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and from_elsewhere(value)):
        return False
    if isinstance(value, (str, Mapping, list, tuple)):
        return bool(value) and sounds_secret(key, value)
    return means_secret(key) or (isinstance(value, int) and _long_number(key, str(value)))


def _long_number(key: str, value: str) -> bool:
    """Whether that is a number that a key such as ``token`` or ``otp`` protects, and no measurement."""
    return value.isdecimal() and len(value) >= LEAST_OF_WEAK and sounds_secret(key) and not COUNTS.search(key)


def from_elsewhere(value: str) -> bool:
    """Whether a secret's value tells nothing: empty, hidden, or where it is taken from, as ``${oc.env:NAME}``."""
    return not value or value == HIDDEN or FROM_ELSEWHERE.fullmatch(value) is not None


def pieces(value: str) -> Iterator[str]:
    """Split a secret value into what can leak of it: as typed, without quotes and brackets, and element by element."""
    yield value
    yield from (found[0][1:-1].replace("\\", "") for found in QUOTED_OR_ESCAPED.finditer(value) if found[0][0] != "\\")
    yield value.strip("'\"").replace("\\", "")
    if value[:1] in ("{", "[") or "," in value:
        for piece in re.split(r"[,{}\[\]]", re.sub(r"\b_target_['\"]?\s*:[^,{}\[\]]*", "", value)):
            yield re.sub(r"^\s*['\"]?[\w.-]+['\"]?\s*:\s*", "", piece).strip(" '\"")


class SecretPart:
    """A secret part of a text: where it begins and ends, and the secret values in it."""

    def __init__(self, start: int, end: int, *found: tuple[str, bool]) -> None:
        self.start, self.end, self.values = start, end, [v for v in found if v[0]]


def parts(text: str) -> Iterator[SecretPart]:
    """Yield the secret parts of a text; they may overlap."""
    whole = WHOLE_URI.match(text)
    for uri in (*([whole] if whole else []), *URI.finditer(text)):
        yield from _of_uri(uri)
    for found in HEADER.finditer(text):
        login = found[3].rstrip("]} ")
        several = [(field.partition("=")[2], False) for field in login.split(";")]
        if "cookie" in found[1].lower() and "=" not in login and (" " in login or not _random(login)):
            continue  # a class of pictures
        yield SecretPart(
            found.start(3), found.start(3) + len(login), (login, True), (login.rpartition(" ")[2], True), *several
        )
    for found in SCHEME_OF_LOGIN.finditer(text):
        if not _random(found[3]):
            continue
        yield SecretPart(found.start(3), found.end(3), (found[3], False))
    for found in TOKEN.finditer(text):
        yield SecretPart(found.start(), found.end(), (found[0], True))
    for found in FLAG.finditer(text):
        if sounds_secret(found[1]) and (end := _end(text, found.end())) > found.end():
            value, strong = text[found.end() : end], _needs_a_secret(found[1])
            if strong or _long_number(found[1], value) or not (PLAIN.fullmatch(value) or MEASURED.fullmatch(value)):
                yield SecretPart(found.end(), end, *((piece, strong) for piece in pieces(value)))
    done, first = 0, len(text) - len(text.lstrip())
    for found in NAMED.finditer(text):
        name = re.split(r"[./@]", found[2] or found[5])[-1]
        if found.end() >= done and sounds_secret(name, _glimpse(text, found.end())):
            for part in _of_named(text, found, name, found.start() <= first):
                done = part.end
                yield part
    done = 0
    for found in FLOW.finditer(text):
        if found.end() >= done and sounds_secret(found[1]):
            end, strong = _end(text, found.end()), means_secret(found[1])
            done = end
            if not re.search(r"\w", text[found.end() : end]):
                continue  # an empty list or mapping
            yield SecretPart(found.end(), end, *((piece, strong) for piece in pieces(text[found.end() : end])))
    for found in (*LINE.finditer(text), *_in_braces(text)):
        value = found[4].strip().strip("'\"")
        if (
            is_secret(found[2], value)
            and (means_secret(found[2]) or _long_number(found[2], value) or not MEASURED.fullmatch(value))
            and value.lower() not in TELLS_NOTHING
        ):
            yield SecretPart(found.start(4), found.end(4), (value, means_secret(found[2])))


def _needs_a_secret(flag: str) -> bool:
    """Whether what stands after a flag of this name is a secret also if it is a plain word: not so after
    ``--token``."""
    return means_secret(flag) or flag.lower().endswith(("-pass", "_pass"))


def _glimpse(text: str, start: int) -> str:
    """The first characters of a value that begins there: enough to see whether it is random."""
    found = QUOTED.match(text, start, start + LONGEST_GLIMPSE) or BARE.match(text, start, start + LONGEST_GLIMPSE)
    return found[0] if found else ""


def _random(word: str) -> bool:
    """Whether a word after ``basic`` is no word of a sentence, as ``training`` or ``augmentation_2x``."""
    mixed = any(
        len(part) >= 6 and re.search(r"\d", part) and re.search(r"[A-Za-z]", part) for part in re.split(r"[_./-]", word)
    )
    mixed = mixed or word.endswith("=") or re.search(r"[a-z][A-Z]\w*[a-z][A-Z]", word) is not None
    syllables = re.split(r"[_./-]", word)
    words = len(syllables) > 1 and all(re.fullmatch(r"[a-z]+|[a-z0-9]{1,3}", part) for part in syllables)
    return mixed or (len(word) >= 16 and not words)


def _in_braces(text: str) -> Iterator[re.Match[str]]:
    """``name: value`` inside of ``{...}``."""
    depth, done = 0, 0
    for found in INSIDE.finditer(text):
        depth += text.count("{", done, found.end(1)) - text.count("}", done, found.end(1))
        done = found.end(1)
        if depth > 0:
            yield found


def _of_named(text: str, found: re.Match[str], name: str, first: bool) -> Iterator[SecretPart]:
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
    if (
        bare.lower().rstrip(".") in TELLS_NOTHING
        or text.startswith("$(", start)
        or from_elsewhere(bare)
        or end <= start
    ):
        return
    if not strong and (
        (re.fullmatch(r"[\d.,e\s\[\]-]+", bare) and not _long_number(name, bare))
        or (name == "key" and PLAIN.fullmatch(bare))
    ):
        return
    yield SecretPart(start, end, *((v, strong) for v in dict.fromkeys(pieces(value))))


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


def _of_uri(found: re.Match[str]) -> Iterator[SecretPart]:
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
        yield SecretPart(start, start + len(login), *known, (pair, True))
    place = start + len(address) + len(mark)
    for field in re.split(r"([&;#])", query):
        name, equals, value = field.partition("=")
        kept = name.lower() in OPTIONS_OF_ADDRESSES or value.lower() in TELLS_NOTHING or re.fullmatch(r"\d{1,4}", value)
        if value and not value.startswith(HIDDEN) and (means_secret(name) or not kept) and not from_elsewhere(value):
            strong = sounds_secret(name)
            begin = place + len(name) + len(equals)
            yield SecretPart(begin, place + len(field), (value, strong), (unquote_plus(value), strong))
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
