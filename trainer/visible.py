"""Makes other people's text safe to show: spells out control characters, and keeps spreadsheets from computing it."""

from __future__ import annotations

import re
from typing import Any

CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
"""C0 without tab and newline, DEL, C1."""
DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
SEPARATORS = "\u2028\u2029"
UNSEEN = re.compile(f"[{CONTROL}{DIRECTION}{SEPARATORS}\ufeff\ud800-\udfff]")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula, or skips on its way to one."""
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.ASCII)
LONGEST_NAME = 200
"""Characters of a name in a sentence."""
RAW_BYTE = range(0xDC80, 0xDD00)
"""Where Python keeps the bytes of a file name that is no UTF-8."""


def visible(text: str) -> str:
    r"""Spell out every character that moves a cursor or turns the reading direction, as ``\x1b``.

    Tabs and newlines stay; a newline of Windows becomes one.
    """
    return UNSEEN.sub(lambda found: spelled(found[0]), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    r"""Like :func:`visible`, and spell out tabs and newlines too: ``\n``."""
    return UNSEEN.sub(lambda found: spelled(found[0]), text).replace("\n", "\\n").replace("\t", "\\t")


def printed(text: str) -> str:
    """Put a text on one line for a picture or a short name: line breaks and invisible characters become spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten a long name or path for a sentence by leaving out its middle."""
    if len(text) <= longest:
        return text
    left = (longest - 3) // 2
    return f"{text[:left]}...{text[len(text) - (longest - 3 - left) :]}"


def spelled(character: str) -> str:
    r"""Spell out a character: ``\x1b``, ``\u202e``; a byte that is no UTF-8 as that byte, ``\xff``."""
    number = ord(character)
    if number in RAW_BYTE:
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def cell(value: Any) -> Any:
    r"""Make a text safe for a CSV cell: one that a spreadsheet would compute gets an apostrophe; numbers stay.

    A text stays on its line: newlines and control characters are spelled out.
    """
    if not isinstance(value, str):
        return value
    quoted = value.startswith(FORMULA) and NUMBER.fullmatch(value) is None
    return ("'" if quoted else "") + one_line(value)
