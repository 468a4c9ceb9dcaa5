"""Draws the pictures of a sweep's report as SVG: curves, parallel coordinates, bars and points; without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDE, TALL, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 70, 20, 15, 45
"""Size and margins in pixels."""
TICKS = 5


def picture(content: Sequence[str], title: str, tall: int = TALL) -> str:
    """An SVG element with a title for readers that do not see it."""
    head = f'<svg viewBox="0 0 {WIDE} {tall}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *content, "</svg>"])


def number(value: float) -> str:
    """A number as a label."""
    return f"{value:.4g}"


def _text(x: float, y: float, shown: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)]


def _axes(xs: tuple[float, float], ys: tuple[float, float], x: str, y: str) -> list[str]:
    drawn = []
    for tick in _ticks(*xs):
        at = _across(tick, xs)
        drawn += [f'<path class="grid" d="M{at:.1f} {TOP}V{TALL - BOTTOM}"/>', _text(at, TALL - 28, number(tick))]
    for tick in _ticks(*ys):
        at = _up(tick, ys)
        drawn += [
            f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDE - RIGHT}"/>',
            _text(LEFT - 6, at + 4, number(tick), "end"),
        ]
    turned = f'<text transform="translate(14 {TALL / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    return [*drawn, _text((LEFT + WIDE - RIGHT) / 2, TALL - 8, x), turned]


def _across(value: float, xs: tuple[float, float]) -> float:
    return LEFT + (value - xs[0]) / (xs[1] - xs[0]) * (WIDE - LEFT - RIGHT)


def _up(value: float, ys: tuple[float, float]) -> float:
    return TALL - BOTTOM - (value - ys[0]) / (ys[1] - ys[0]) * (TALL - TOP - BOTTOM)


def curves(series: Mapping[str, Sequence[tuple[float, float]]], best: str | None, x: str, y: str) -> str:
    """A curve for each job; the best one is emphasised, and drawn last.

    Args:
        series: points (x, y) of each job, finite. best: the best job.
    """
    everything = [point for points in series.values() for point in points]
    xs, ys = _span([at for at, _ in everything]), _span([value for _, value in everything])
    drawn = _axes(xs, ys, x, y)
    for name in sorted(series, key=lambda one: one == best):
        places = [(_across(at, xs), _up(value, ys)) for at, value in series[name]]
        kind = "best" if name == best else "job"
        title = f"<title>{escape(name)}</title>"
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        drawn.append(f'<path class="line {kind}" d="{path}">{title}</path>')
        drawn += [f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.5">{title}</circle>' for a, b in places]
    return picture(drawn, f"{y} of all jobs")


def points(places: Mapping[str, tuple[float, float]], best: str | None, x: str, y: str) -> str:
    """A point for each job; the axis of y begins at 0."""
    xs, ys = _span([a for a, _ in places.values()]), (0.0, max(b for _, b in places.values()) * 1.05 or 1.0)
    wider = 0.05 * (xs[1] - xs[0])
    xs = (xs[0] - wider, xs[1] + wider)
    drawn = _axes(xs, ys, x, y)
    for name in sorted(places, key=lambda one: one == best):
        a, b = _across(places[name][0], xs), _up(places[name][1], ys)
        kind = "best" if name == best else "job"
        drawn.append(f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{escape(name)}</title></circle>')
    return picture(drawn, f"{y} over {x}")


def bars(values: Mapping[str, float]) -> str:
    """A horizontal bar from 0 to 1 for each name, the longest first."""
    drawn, room = [], WIDE - 330
    tall = 26 * len(values) + 10
    for row, (name, value) in enumerate(sorted(values.items(), key=lambda item: -item[1])):
        y = 26 * row + 8
        drawn += [
            _text(250, y + 13, name, "end"),
            f'<rect class="bar" x="260" y="{y}" width="{max(1.0, value * room):.1f}" height="18"/>',
            _text(266 + value * room, y + 13, f"{value:.2f}", "start"),
        ]
    return picture(drawn, "importance of the keys", tall)


def parallel(axes: Mapping[str, Sequence[str]], rows: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> str:
    """Parallel coordinates: a vertical axis for each key, a line for each job.

    Args:
        axes: of each key the labels from bottom to top. rows: of each job its place on each axis, from 0 to 1.
        names: of each job its class: ``best``, ``job`` or ``good``.
    """
    drawn = []
    places = [LEFT + n * (WIDE - 2 * LEFT) / max(1, len(axes) - 1) for n in range(len(axes))]
    low, room = TALL - BOTTOM, TALL - TOP - BOTTOM - 10
    order = {"job": 0, "good": 1, "best": 2}
    for job in sorted(rows, key=lambda one: order[names[one]]):
        path = "M" + "L".join(f"{x:.1f} {low - share * room:.1f}" for x, share in zip(places, rows[job], strict=True))
        drawn.append(f'<path class="line {names[job]}" d="{path}"><title>{escape(job)}</title></path>')
    for place, (key, labels) in zip(places, axes.items(), strict=True):
        drawn += [f'<path class="axis" d="M{place:.1f} {low}V{low - room}"/>', _text(place, TALL - 20, key)]
        for n, label in enumerate(labels):
            share = n / (len(labels) - 1) if len(labels) > 1 else 0.5
            drawn.append(_text(place + 6, low - share * room + 4, label, "start"))
    return picture(drawn, "parallel coordinates")
