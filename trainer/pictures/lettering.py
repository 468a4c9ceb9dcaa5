"""Texts in pictures: cut or wrapped to the room they have, in fonts that have all their letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from trainer.visible import printed

ELLIPSIS = "…"
MOST = 400
"""Most letters of a text that are used: no picture has room for more."""
DPI = 110
"""Pixels to the inch of our pictures."""
OWN = "DejaVu Sans"
"""The font that matplotlib brings: Latin, Greek, Cyrillic, Arabic, Hebrew."""
WIDER = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Unifont",
)
"""Fonts with other letters, of which a machine may have some."""


def families(texts: Iterable[str]) -> list[str]:
    """The fonts that these texts need: the project's own, then fonts of this machine that have more letters."""
    if not missing(texts, [OWN]):
        return [OWN]
    from matplotlib.font_manager import fontManager

    here = {font.name for font in fontManager.ttflist}
    return [OWN, *(name for name in WIDER if name in here)]


def missing(texts: Iterable[str], fonts: Sequence[str]) -> set[str]:
    """Return the letters of the texts that none of the fonts has."""
    letters = {letter for text in texts for letter in text if not letter.isspace()}
    return {letter for letter in letters if not any(ord(letter) in _letters(font) for font in fonts)}


@cache
def _letters(font: str) -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(font)).get_charmap())


class Ruler:
    """Measures the width of texts letter by letter, which is never less than what they take when drawn.

    Args:
        size: of the letters, in points.
        fonts: their families; the first that has a letter draws it.
    """

    def __init__(self, size: float, fonts: Sequence[str]) -> None:
        from matplotlib.backends.backend_agg import RendererAgg
        from matplotlib.font_manager import FontProperties

        self.renderer: Any = RendererAgg(1, 1, DPI)  # type: ignore[no-untyped-call]
        self.font = FontProperties(family=list(fonts), size=size)
        self.widths: dict[str, float] = {}

    def inches(self, text: str) -> float:
        """The width in inches of a text on one line."""
        for letter in set(text).difference(self.widths):
            ten, _, _ = self.renderer.get_text_width_height_descent(10 * letter, self.font, False)
            self.widths[letter] = float(ten) / 10 / DPI
        return sum(self.widths[letter] for letter in text)

    def cut(self, text: str, room: float) -> str:
        """Shorten a text to one line of ``room`` inches by leaving out its middle."""
        text = _some(printed(text))
        if self.inches(text) <= room:
            return text
        least, most = 0, len(text) - 1  # letters that stay
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.inches(_without_middle(text, middle)) <= room else (least, middle - 1)
        return _without_middle(text, least)

    def wrap(self, text: str, room: float, lines: int) -> str:
        """Wrap a text into at most ``lines`` lines of ``room`` inches; a longer text loses its middle."""
        text = _some(printed(text))
        if len(wrapped := self._lines(text, room)) <= lines:
            return "\n".join(wrapped)
        least, most = 0, len(text) - 1
        while least < most:
            middle = (least + most + 1) // 2
            fits = len(self._lines(_without_middle(text, middle), room)) <= lines
            least, most = (middle, most) if fits else (least, middle - 1)
        return "\n".join(self._lines(_without_middle(text, least), room))

    def _lines(self, text: str, room: float) -> list[str]:
        """Lines broken between words, and inside a word that is longer than a line."""
        lines, line = [], ""
        for word in text.split(" "):
            if line and self.inches(f"{line} {word}") <= room:
                line = f"{line} {word}"
                continue
            if line:
                lines.append(line)
            line = word
            while self.inches(line) > room and len(line) > 1:
                head = self._head(line, room)
                lines.append(line[:head])
                line = line[head:]
        return [*lines, line]

    def _head(self, word: str, room: float) -> int:
        least, most = 1, len(word) - 1
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.inches(word[:middle]) <= room else (least, middle - 1)
        return least


def _without_middle(text: str, letters: int) -> str:
    """So many letters of the text, of its beginning and of its end."""
    end = letters // 2
    return text[: letters - end].rstrip() + ELLIPSIS + (text[-end:].lstrip() if end else "")


def _some(text: str) -> str:
    return text if len(text) <= MOST else _without_middle(text, MOST)


UNDRAWN = "No font of this machine has the letters of classes that are shown by number; per_class.csv has their names."


def drawable(names: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Class names for the pictures, the fonts that they need, and a footnote if some names are shown as numbers."""
    names = [printed(name) for name in names]
    fonts = families(names)
    lacking = missing(names, fonts)
    shown = [f"class {n}" if lacking.intersection(name) else name for n, name in enumerate(names)]
    return shown, fonts, UNDRAWN if shown != names else ""
