"""Draws the middle of a flower: an RGBA square, by the kinds that ``species.CENTRES`` names."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

from trainer.data.drawn_flowers.species import Colour


class _Canvas:
    """A square at twice its size, and what is drawn on it.

    Attributes:
        mid: the centre's x and y, and the greatest radius; pixels.
    """

    def __init__(self, pixels: int, rng: np.random.Generator) -> None:
        big = 2 * pixels
        self.picture = Image.new("RGBA", (big, big), (90, 80, 30, 0))
        self.pen = ImageDraw.Draw(self.picture)
        self.mid = big / 2
        self.rng = rng

    def disc(self, x: float, y: float, radius: float, colour: Colour) -> None:
        self.pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(*colour, 255))

    def florets(self, count: int, reach: float, size: float, inner: Colour, outer: Colour) -> None:
        """Vogel's sunflower spiral of ``count`` discs; their colour goes from ``inner`` to ``outer``."""
        for i in range(count):
            r, a = math.sqrt((i + 0.5) / count), i * 2.39996323
            wobble = self.rng.uniform(-0.12, 0.12)
            lit = 1 + wobble - 0.16 * r * math.sin(a + 0.8)
            tone = [min(255, int((p * (1 - r) + q * r) * lit)) for p, q in zip(inner, outer, strict=True)]
            x, y = self.mid + reach * r * math.cos(a), self.mid + reach * r * math.sin(a)
            self.disc(x, y, size, (tone[0], tone[1], tone[2]))


def _button(canvas: _Canvas) -> None:
    mid = canvas.mid
    canvas.disc(mid, mid, mid * 0.97, (150, 98, 10))
    canvas.florets(90, mid * 0.90, mid * 0.105, (214, 176, 40), (250, 200, 40))


def _dark(canvas: _Canvas) -> None:
    mid = canvas.mid
    canvas.disc(mid, mid, mid * 0.97, (38, 22, 14))
    canvas.florets(110, mid * 0.90, mid * 0.075, (52, 40, 26), (108, 66, 26))


def _trumpet(canvas: _Canvas) -> None:
    """Nested rings from the lit rim to the dark throat."""
    mid, steps = canvas.mid, 72
    rim = [mid * (0.90 + 0.07 * math.sin(i * 2 * math.pi * 11 / steps)) for i in range(steps)]
    for part in range(12):
        f, dark = 1 - 0.075 * part, 1 - 0.055 * part
        ring = [
            (mid + rim[i] * f * math.cos(i * 2 * math.pi / steps), mid + rim[i] * f * math.sin(i * 2 * math.pi / steps))
            for i in range(steps)
        ]
        canvas.pen.polygon(ring, fill=(int(246 * dark), int(128 * dark * (1 - 0.02 * part)), int(22 * dark), 255))
    canvas.florets(6, mid * 0.15, mid * 0.06, (250, 220, 90), (250, 220, 90))


def _eye(canvas: _Canvas) -> None:
    mid = canvas.mid
    canvas.disc(mid, mid, mid * 0.95, (238, 214, 90))
    canvas.disc(mid, mid, mid * 0.62, (206, 150, 30))
    canvas.disc(mid, mid, mid * 0.34, (70, 54, 16))


def _stamens(canvas: _Canvas) -> None:
    mid, rng = canvas.mid, canvas.rng
    for i in range(16):
        a, r = (i + rng.uniform(-0.3, 0.3)) * 2 * math.pi / 16, mid * rng.uniform(0.55, 0.88)
        x, y = mid + r * math.cos(a), mid + r * math.sin(a)
        canvas.pen.line((mid, mid, x, y), fill=(226, 224, 160, 255), width=max(1, round(mid * 0.035)))
        canvas.disc(x, y, mid * 0.095, (96, 58, 14))
        canvas.disc(x - mid * 0.02, y - mid * 0.02, mid * 0.07, (214, 150, 30))
    canvas.disc(mid, mid, mid * 0.20, (84, 118, 44))
    canvas.disc(mid - mid * 0.04, mid - mid * 0.05, mid * 0.12, (150, 180, 84))


def _column(canvas: _Canvas) -> None:
    mid, rng = canvas.mid, canvas.rng
    a = rng.uniform(0, 2 * math.pi)
    for i in range(34):
        f = i / 33
        x, y = mid + 0.84 * mid * f * math.cos(a), mid + 0.84 * mid * f * math.sin(a)
        canvas.disc(x, y, mid * (0.085 - 0.02 * f), (236, 214, 150))
        if f > 0.4:
            b, r = rng.uniform(0, 2 * math.pi), mid * rng.uniform(0.08, 0.14)
            canvas.disc(x + r * math.cos(b), y + r * math.sin(b), mid * 0.05, (250, 206, 40))
    canvas.disc(mid + 0.88 * mid * math.cos(a), mid + 0.88 * mid * math.sin(a), mid * 0.085, (176, 30, 40))


_KINDS: dict[str, tuple[Callable[[_Canvas], None], float]] = {
    "button": (_button, 0.27),
    "dark": (_dark, 0.38),
    "trumpet": (_trumpet, 0.42),
    "eye": (_eye, 0.13),
    "stamens": (_stamens, 0.36),
    "column": (_column, 0.52),
}
"""Kind of centre -> the function that draws it, and its radius as a fraction of the petals' length."""


def centre(kind: str, pixels: int, rng: np.random.Generator) -> tuple[Image.Image, float]:
    """Draw the middle of a flower: an RGBA square of `pixels`, and its radius as a fraction of the petals' length."""
    draw, radius = _KINDS[kind]
    canvas = _Canvas(pixels, rng)
    draw(canvas)
    return canvas.picture.reduce(2), radius
