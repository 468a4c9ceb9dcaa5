"""Paints one picture of a drawn flower: background, stem, leaves, petals and centre, in its own pose and light."""

import colorsys
import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from trainer.data.drawn_flowers.centres import centre
from trainer.data.drawn_flowers.petals import BASE, PETAL_LENGTH, leaf, petal
from trainer.data.drawn_flowers.species import COLOURS, Colour, Species

Matrix = tuple[float, float, float, float]  # a 2 x 2 matrix, row by row

# What a background is mostly made of: two colours to mix, and the colours of what is scattered in it.
_BACKDROPS: list[tuple[Colour, Colour, list[Colour]]] = [
    ((44, 84, 34), (96, 136, 60), [(30, 62, 24), (128, 160, 78), (70, 110, 48), (180, 190, 120)]),  # meadow
    ((16, 30, 16), (40, 62, 36), [(8, 16, 10), (54, 84, 40), (30, 50, 34)]),  # shade
    ((116, 162, 214), (196, 218, 238), [(230, 238, 246), (92, 136, 190), (90, 120, 70)]),  # sky
    ((92, 66, 44), (140, 106, 76), [(60, 40, 26), (164, 136, 100), (84, 96, 50)]),  # soil
    ((186, 168, 128), (214, 200, 164), [(150, 130, 92), (228, 220, 196), (130, 140, 84)]),  # dry grass
    ((20, 20, 24), (44, 42, 50), [(10, 10, 12), (60, 60, 68)]),  # night
    ((206, 208, 206), (236, 236, 232), [(180, 184, 182), (246, 246, 244)]),  # wall
]


def _jitter(colour: Colour, rng: np.random.Generator, hue: float, value: float) -> Colour:
    """The colour, its hue turned by up to `hue` of a full turn and its brightness changed by up to `value`."""
    h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
    h = (h + rng.uniform(-hue, hue)) % 1
    s = min(1.0, s * rng.uniform(0.85, 1.1))
    v = min(1.0, v * rng.uniform(1 - value, 1 + value / 2))
    r, g, b = colorsys.hsv_to_rgb(h, s, v)
    return int(r * 255), int(g * 255), int(b * 255)


def _mix(a: Colour, b: Colour, share: float) -> Colour:
    r, g, c = (int(p * (1 - share) + q * share) for p, q in zip(a, b, strict=True))
    return r, g, c


def _backdrop(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """An out-of-focus garden, `width` x `height`, RGB: drawn small, blurred, enlarged."""
    first, second, scattered = _BACKDROPS[rng.choice(len(_BACKDROPS), p=(0.3, 0.15, 0.12, 0.12, 0.12, 0.1, 0.09))]
    first, second = _jitter(first, rng, 0.05, 0.35), _jitter(second, rng, 0.05, 0.35)
    small_w, small_h = 72, round(72 * height / width)
    ramp = Image.linear_gradient("L").rotate(90 * int(rng.integers(4))).resize((small_w, small_h))
    small = Image.composite(Image.new("RGB", ramp.size, first), Image.new("RGB", ramp.size, second), ramp)
    pen = ImageDraw.Draw(small)
    for _ in range(rng.integers(14, 34)):  # leaves and clods
        x, y, r = rng.uniform(0, small_w), rng.uniform(0, small_h), rng.uniform(2, 13)
        tone = _jitter(scattered[rng.integers(len(scattered))], rng, 0.04, 0.25)
        if rng.random() < 0.5:
            pen.ellipse((x - r, y - r * 0.8, x + r, y + r * 0.8), fill=tone)
        else:
            a = rng.uniform(0, math.pi)
            dx, dy = 2.2 * r * math.cos(a), 2.2 * r * math.sin(a)
            pen.line((x - dx, y - dy, x + dx, y + dy), fill=tone, width=int(rng.integers(1, 6)))
    if rng.random() < 0.7:  # other flowers, of any colour
        names = list(COLOURS)
        bed = COLOURS[names[rng.integers(len(names))]]
        for _ in range(rng.integers(2, 16)):
            x, y, r = rng.uniform(0, small_w), rng.uniform(0, small_h), rng.uniform(3, 11)
            pen.ellipse((x - r, y - r, x + r, y + r * rng.uniform(0.4, 1)), fill=_jitter(bed, rng, 0.02, 0.15))
    small = small.filter(ImageFilter.GaussianBlur(rng.uniform(1.6, 4.0)))
    return small.resize((width, height), Image.Resampling.BILINEAR)


def _times(a: Matrix, b: Matrix) -> Matrix:
    return (a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3])


def _turn(angle: float) -> Matrix:
    return math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)


def _place(
    canvas: Image.Image, part: Image.Image, anchor: tuple[float, float], at: tuple[float, float], m: Matrix
) -> None:
    """Puts the premultiplied `part` on the canvas: its point `anchor` falls on `at`, its axes are mapped by `m`."""
    corners = [(x - anchor[0], y - anchor[1]) for x in (0, part.width) for y in (0, part.height)]
    xs = [at[0] + m[0] * x + m[1] * y for x, y in corners]
    ys = [at[1] + m[2] * x + m[3] * y for x, y in corners]
    left, top = max(0, math.floor(min(xs))), max(0, math.floor(min(ys)))
    right, bottom = min(canvas.width, math.ceil(max(xs))), min(canvas.height, math.ceil(max(ys)))
    determinant = m[0] * m[3] - m[1] * m[2]
    if right <= left or bottom <= top or abs(determinant) < 1e-6:
        return
    a, b, c, d = m[3] / determinant, -m[1] / determinant, -m[2] / determinant, m[0] / determinant
    x0, y0 = left - at[0], top - at[1]
    data = (a, b, a * x0 + b * y0 + anchor[0], c, d, c * x0 + d * y0 + anchor[1])
    patch = part.transform((right - left, bottom - top), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
    straight = patch.convert("RGBA")
    canvas.paste(straight, (left, top), straight)


def _lit(part: Image.Image, light: float, made: dict[int, Image.Image]) -> Image.Image:
    """The RGBA part with its colours (not its opacity) scaled by `light`, in steps of 1/16; `made` keeps each step.

    The result is premultiplied, as Pillow would make it again for every petal placed.
    """
    step = round(light * 16)
    if step not in made:
        table = [min(255, v * step // 16) for v in range(256)]
        made[step] = part.point(table * 3 + list(range(256))).convert("RGBa")
    return made[step]


def _stem(
    canvas: Image.Image, start: tuple[float, float], green: Colour, thick: float, rng: np.random.Generator
) -> None:
    """A curved stalk from the flower's middle down and out of the picture, with a few leaves along it."""
    size = min(canvas.size)
    end = (start[0] + rng.uniform(-0.35, 0.35) * size, canvas.height + 0.1 * size)
    bend = (start[0] + rng.uniform(-0.25, 0.25) * size, (start[1] + end[1]) / 2)
    points = []
    for i in range(17):  # a quadratic Bezier curve
        f = i / 16
        p, q, r = (1 - f) ** 2, 2 * f * (1 - f), f * f
        points.append((p * start[0] + q * bend[0] + r * end[0], p * start[1] + q * bend[1] + r * end[1]))
    picture = leaf(green, rng.uniform(0.3, 0.6), max(24, round(0.34 * size)), rng)
    lit: dict[int, Image.Image] = {}
    for _ in range(rng.integers(1, 5)):
        x, y = points[rng.integers(2, 15)]
        grow = rng.uniform(0.6, 1.4)
        m = _times(_turn(rng.uniform(0.5, 2.4) * rng.choice([-1, 1])), (grow, 0, 0, grow))
        _place(canvas, _lit(picture, rng.uniform(0.75, 1.2), lit), (picture.width / 2, 0), (x, y), m)
    left, right = min(x for x, _ in points) - 2 * thick, max(x for x, _ in points) + 2 * thick
    box = [max(0, int(left)), max(0, int(start[1] - 2 * thick)), min(canvas.width, int(right)), canvas.height]
    if box[2] <= box[0] or box[3] <= box[1]:
        return
    for offset, width, tone in (
        (0.0, 1.0, _mix(green, (0, 0, 0), 0.4)),
        (-0.2, 0.45, _mix(green, (255, 255, 220), 0.12)),
    ):
        mask = Image.new("L", (2 * (box[2] - box[0]), 2 * (box[3] - box[1])))
        line = [(2 * (x + offset * thick - box[0]), 2 * (y - box[1])) for x, y in points]
        ImageDraw.Draw(mask).line(line, fill=255, width=max(1, round(2 * thick * width)), joint="curve")
        canvas.paste(tone, (box[0], box[1]), mask.reduce(2))


def _bloom(
    canvas: Image.Image, kind: Species, at: tuple[float, float], radius: float, first: Colour, rng: np.random.Generator
) -> None:
    """One flower of the class with petals `radius` pixels long, seen from an angle of its own."""
    pixels = max(12, min(PETAL_LENGTH, round(radius)))
    second = _jitter(COLOURS[kind.second], rng, 0.012, 0.1)
    crowding = (
        min(1.0, 9.0 / kind.petals) if kind.shape not in ("strap", "lance", "pointed") else min(1.0, 22.0 / kind.petals)
    )
    part = petal(kind.shape, kind.pattern, first, second, crowding * rng.uniform(0.9, 1.1), pixels, rng)
    axis, tilt = rng.uniform(0, 2 * math.pi), math.cos(rng.uniform(0, 0.75))
    view = _times(_turn(axis), _times((1, 0, 0, tilt), _turn(-axis)))
    sun, contrast, cup = rng.uniform(0, 2 * math.pi), rng.uniform(0.04, 0.16), rng.uniform(-0.08, 0.14)
    spin, loose = rng.uniform(0, 2 * math.pi), rng.uniform(0.02, 0.07)
    anchor = (part.width / 2, part.height * BASE)
    lit: dict[int, Image.Image] = {}
    for layer in range(kind.layers):
        reach = radius / pixels * (1 - 0.27 * layer)
        for i in range(kind.petals):
            angle = spin + (i + 0.5 * layer + rng.normal() * loose) * 2 * math.pi / kind.petals
            outward = angle + math.pi / 2  # the direction in which the petal, drawn downwards, points once turned
            length = reach * (1 + rng.normal() * loose) * (1 + cup * math.sin(outward - axis))
            mirror = reach * (1 if rng.random() < 0.5 else -1) * rng.uniform(0.93, 1.05)
            light = (1 + contrast * math.cos(outward - sun) + rng.normal() * 0.02) * (0.97 + 0.04 * layer)
            m = _times(view, _times(_turn(angle), (mirror, 0, 0, length)))
            _place(canvas, _lit(part, light, lit), anchor, at, m)
    disc, share = centre(kind.centre, max(12, min(128, round(radius * 0.7))), rng)
    grow = 2 * radius * share * rng.uniform(0.9, 1.12) / disc.width
    _place(
        canvas,
        disc.convert("RGBa"),
        (disc.width / 2, disc.height / 2),
        at,
        _times(view, _times(_turn(spin), (grow, 0, 0, grow))),
    )


def paint(kind: Species, size: int, rng: np.random.Generator) -> Image.Image:
    """Paint one RGB picture of a flower class: shorter side `size` pixels, longer side at most 1.25 times that."""
    long = round(size * rng.uniform(1.0, 1.25))
    width, height = (long, size) if rng.random() < 0.6 else (size, long)
    canvas = _backdrop(width, height, rng)
    green = _jitter((88, 132, 52), rng, 0.06, 0.35)
    first = _jitter(COLOURS[kind.colour], rng, 0.014, 0.12)
    radius = size * rng.uniform(0.23, 0.44)
    places = [((rng.uniform(0.40, 0.60) * width, rng.uniform(0.38, 0.58) * height), radius)]
    for _ in range(rng.choice(3, p=(0.72, 0.20, 0.08))):  # smaller flowers of the same class, behind
        spot = (rng.uniform(0.05, 0.95) * width, rng.uniform(0.05, 0.9) * height)
        places.insert(0, (spot, radius * rng.uniform(0.35, 0.6)))
    for spot, reach in places:
        _stem(canvas, spot, green, max(1.5, 0.055 * reach), rng)
        _bloom(canvas, kind, spot, reach, first, rng)
    exposure = rng.uniform(0.78, 1.15)
    gains = [exposure * rng.uniform(0.87, 1.13) for _ in range(3)]
    gamma = rng.uniform(0.88, 1.15)
    return canvas.point(
        [min(255, int(255 * min(1.0, gain * (v / 255) ** gamma))) for gain in gains for v in range(256)]
    )


def jpeg(picture: Image.Image) -> bytes:
    """Encode a painted picture as the bytes of a JPEG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()
