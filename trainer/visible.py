"""Makes other people's text safe to show: spells out control characters."""

from __future__ import annotations

import re

CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
"""C0 without tab and newline, DEL, C1."""
DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
SEPARATORS = "\u2028\u2029"
UNSEEN = re.compile(f"[{CONTROL}{DIRECTION}{SEPARATORS}\ufeff\ud800-\udfff]")
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
    """Shorten a long name or path by leaving out its middle, so that both ends stay visible."""
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
