"""Draws the parts of a flower as small RGBA pictures: a petal and a leaf, shaded from a class's parameters.

Every part lies in its own frame, base at the top edge and tip at the bottom edge. `painter` places it by an affine map,
so a flower of twenty petals costs one petal's shading.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.data.drawn_flowers.species import SHAPES, Colour

Floats = NDArray[np.floating[Any]]

PETAL_LENGTH = 160  # pixels of a petal's picture from base to tip, for pictures of about 500 px
_MARGIN = 0.045  # of the length, on each side: room for the soft shadow
BASE = _MARGIN / (1 + 2 * _MARGIN)  # where a petal begins, as a fraction of its picture's height


def _noise(rng: np.random.Generator, rows: int, columns: int, shape: tuple[int, int]) -> Floats:
    """Smooth noise in about -1..1 of `shape` (height, width), from a grid of rows x columns."""
    grid = Image.fromarray(rng.uniform(-1, 1, (rows, columns)).astype(np.float32))
    return np.asarray(grid.resize((shape[1], shape[0]), Image.Resampling.BICUBIC), np.float32)


def _smooth(x: Floats, low: float, high: float) -> Floats:
    """0 below `low`, 1 above `high`, smooth between."""
    t = np.clip((x - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def _bump(x: Floats, width: float) -> Floats:
    return np.exp(-((x / width) ** 2))


def _outline(shape: str, t: Floats) -> Floats:
    """Half width of a petal at the fraction `t` of its length, as a fraction of its greatest half width."""
    t = np.clip(t, 0, 1)
    if shape == "strap":
        return np.minimum(1, 0.62 + 1.3 * t) * np.sqrt(np.clip(1 - t**7, 0, 1))
    if shape == "lance":
        return np.clip(np.sin(np.pi * t**0.85), 0, 1) ** 0.9 * (1 - 0.15 * t) + 0.1 * (1 - t)
    if shape == "pointed":
        return np.clip(1.75 * t + 0.30, 0, 1) * np.clip(1.9 * (1 - t), 0, 1) ** 0.8
    if shape == "spoon":
        return (
            0.24
            + 0.76 * _smooth(t, 0.1, 0.72)
            - (1 - np.sqrt(np.clip(1 - np.clip((t - 0.66) / 0.34, 0, 1) ** 2, 0, 1)))
        )
    narrow = {"round": 0.34, "notched": 0.26, "ruffled": 0.40, "fringed": 0.16}[shape]
    belly = {"round": 0.58, "notched": 0.70, "ruffled": 0.66, "fringed": 0.80}[shape]
    rise = narrow + (1 - narrow) * np.sin(np.pi / 2 * np.clip(t / belly, 0, 1))
    fall = np.sqrt(np.clip(1 - (np.clip(t - belly, 0, 1) / (1 - belly)) ** 2, 0, 1))
    return np.where(t < belly, rise, fall)


def _tip(shape: str, s: Floats, rng: np.random.Generator) -> Floats:
    """Where the petal ends, as a fraction of its length, at `s` half widths from its midrib."""
    if shape == "notched":
        return 1 - 0.26 * _bump(s, 0.24)
    if shape == "ruffled":
        phase = rng.uniform(0, 2 * np.pi)
        return 0.955 + 0.045 * np.sin(s * 9 + phase) * np.cos(s * 4 + 2 * phase)
    if shape == "fringed":
        saw = np.abs(((s * 4.5 + rng.uniform(0, 1)) % 1) - 0.5) * 2
        return 1 - 0.20 * saw
    if shape == "strap":
        return 1 - 0.04 * np.cos(s * 7) ** 2
    return np.ones_like(s)


def _pattern(pattern: str, t: Floats, s: Floats, edge: Floats, rng: np.random.Generator) -> Floats:
    """How much of the second colour shows at each point, 0..1."""
    if pattern == "throat":
        return 0.95 * _smooth(0.46 + 0.05 * np.cos(s * 14) - 0.10 * np.abs(s) - t, -0.07, 0.07)
    if pattern == "rim":
        return 0.95 * _smooth(-edge, -0.15, -0.07)
    if pattern == "stripe":
        return 0.95 * _smooth(0.30 - np.abs(s), -0.07, 0.07) * _smooth(1 - t, 0.02, 0.14)
    if pattern == "veins":
        rays = np.abs(np.sin((s * (1 + 0.25 * t)) * 8.5))
        return 0.85 * _smooth(0.32 - rays, -0.12, 0.12) * _smooth(0.93 - t, 0, 0.3)
    if pattern == "tips":
        return 0.95 * _smooth(t + 0.05 * np.cos(s * 11), 0.60, 0.74)
    if pattern == "freckles":
        spots = np.zeros_like(t)
        for _ in range(26):
            at_t, at_s, wide = rng.uniform(0.14, 0.80), rng.uniform(-0.75, 0.75), rng.uniform(0.022, 0.042)
            spots = np.maximum(spots, _smooth(wide - np.hypot(t - at_t, (s - at_s) * 0.3), -0.012, 0.008))
        return 0.95 * spots
    return np.zeros_like(t)


def petal(
    shape: str, pattern: str, first: Colour, second: Colour, widen: float, pixels: int, rng: np.random.Generator
) -> Image.Image:
    """Draw one petal as RGBA, `pixels` long from base to tip, `widen` times as wide as its shape's usual width."""
    aspect = SHAPES[shape][1] * widen
    height = round(pixels * (1 + 2 * _MARGIN))
    width = max(8, round(pixels * (aspect + 2 * _MARGIN)))
    along = (np.arange(height, dtype=np.float32)[:, None] + 0.5) / pixels - _MARGIN
    across = ((np.arange(width, dtype=np.float32)[None, :] + 0.5) - width / 2) / (pixels * aspect / 2)
    across = across + 0.10 * rng.uniform(-1, 1) * along**2  # a petal is never quite straight
    half = np.maximum(_outline(shape, along), 1e-3)
    s = across / half
    t = np.broadcast_to(along, s.shape)
    mottle = _noise(rng, 7, 7, s.shape)
    side = (half - np.abs(across)) * (aspect / 2) + 0.02 * mottle * (aspect > 0.4)
    edge = np.minimum(np.minimum(side, (_tip(shape, across, rng) - t) * 0.9), t + 0.02)  # lengths, positive inside
    inside = np.clip(s, -1, 1)

    amount = _pattern(pattern, t, inside, edge, rng)[..., None]
    colour = np.array(first, np.float32) * (1 - amount) + np.array(second, np.float32) * amount
    streaks = _noise(rng, 3, max(6, round(34 * aspect)), s.shape)
    midrib = _bump(inside, 0.07) * _smooth(0.95 - t, 0, 0.4)
    light = (
        0.80
        + 0.22 * _smooth(t, 0.0, 0.55)
        + 0.10 * inside * float(rng.choice([-1, 1]))
        - 0.16 * inside**4
        - 0.10 * midrib
        + 0.06 * _bump(np.abs(inside) - 0.2, 0.12)
        + 0.055 * streaks
        + 0.045 * mottle
        - 0.14 * _smooth(-edge, -0.02, 0.0)
    )
    mask = _smooth(edge, -0.5 / pixels, 1.2 / pixels)
    shadow = 0.42 * _smooth(edge, -_MARGIN, 0.0)
    rgba = np.empty((height, width, 4), np.float32)
    rgba[..., :3] = colour * (light * mask)[..., None] + np.array((14, 16, 10), np.float32) * (1 - mask)[..., None]
    rgba[..., 3] = 255 * np.maximum(mask, shadow)
    return Image.fromarray(np.clip(rgba, 0, 255).astype(np.uint8))


def leaf(colour: Colour, slender: float, pixels: int, rng: np.random.Generator) -> Image.Image:
    """Draw one green leaf with midrib and side veins as RGBA, `pixels` long and `slender` times as wide."""
    height, width = pixels, max(8, round(pixels * slender))
    t = (np.arange(height, dtype=np.float32)[:, None] + 0.5) / height
    u = (np.arange(width, dtype=np.float32)[None, :] + 0.5) / width * 2 - 1
    u = u * 1.15 + 0.22 * rng.uniform(-1, 1) * np.sin(np.pi * t)
    half = np.maximum(np.clip(np.sin(np.pi * t**0.8), 0, 1) ** 0.8 * 0.8, 1e-3)
    s = np.clip(u / half, -1, 1)
    veins = _bump(np.sin((t * 10 - np.abs(s) * 1.6) * np.pi), 0.22)
    light = 0.86 + 0.16 * np.sign(s) * float(rng.choice([-1, 1])) + 0.12 * _bump(s, 0.06) - 0.09 * veins
    light = light + 0.07 * _noise(rng, 6, 4, light.shape)
    rgba = np.empty((*light.shape, 4), np.float32)
    rgba[..., :3] = np.array(colour, np.float32) * light[..., None]
    rgba[..., 3] = 255 * _smooth((half - np.abs(u)) * width / 2, -1.0, 1.0)
    return Image.fromarray(np.clip(rgba, 0, 255).astype(np.uint8))
