"""Writes docs/modes.svg, the four parameter-server modes as timelines: ``python docs/draw_modes.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).with_name("modes.svg")
WIDTH, HEIGHT = 560, 236
LEFT, RIGHT = 86, 546
LANES = {"worker 0": 66, "server": 126, "worker 1": 186}
BOX = 22
COLORS = {"worker 0": "#dbe8ff", "worker 1": "#d9f2d6", "server": "#ffe6b8"}


@dataclass
class Panel:
    """One mode: steps (lane, start, end, text), updates at the server, arrows between a worker and the server,
    waits."""

    title: str
    says: str
    steps: list[tuple[str, int, int, str]] = field(default_factory=list)
    updates: list[tuple[int, str]] = field(default_factory=list)
    pushes: list[tuple[str, int, int]] = field(default_factory=list)
    pulls: list[tuple[str, int, int]] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)


def sync() -> Panel:
    """Both workers take each step together; the faster one waits."""
    panel = Panel("pserver_sync", "all gradients of a step, one update, then all workers pull")
    for number, start in enumerate((96, 246, 396)):
        panel.steps += [
            ("worker 0", start, start + 60, f"step {number + 1}"),
            ("worker 1", start, start + 96, f"step {number + 1}"),
        ]
        panel.waits += [("worker 0", start + 60, start + 142)]
        panel.pushes += [("worker 0", start + 60, start + 76), ("worker 1", start + 96, start + 110)]
        panel.updates += [(start + 118, f"v{number + 1}")]
        panel.pulls += [("worker 0", start + 127, start + 142), ("worker 1", start + 127, start + 142)]
    return panel


def asynchronous() -> Panel:
    """Each push is an update; a step computes with parameters that may lack others' pushes, and its own last one."""
    panel = Panel("pserver_async", "each push is an update at once; no worker waits")
    fast, slow = 70, 122
    for number in range(6):
        start = 96 + fast * number
        panel.steps += [("worker 0", start, start + fast - 6, str(number + 1))]
        panel.pushes += [("worker 0", start + fast - 6, start + fast + 5)]
    for number in range(3):
        start = 96 + slow * number
        panel.steps += [("worker 1", start, start + slow - 6, str(number + 1))]
        panel.pushes += [("worker 1", start + slow - 6, start + slow + 5)]
    times = sorted([96 + fast * n + fast + 13 for n in range(6)] + [96 + slow * n + slow + 14 for n in range(3)])
    panel.updates += [(time, f"v{number + 1}") for number, time in enumerate(times)]
    panel.pulls += [("worker 0", 82 + fast * n, 95 + fast * n) for n in range(1, 6)]
    panel.pulls += [("worker 1", 82 + slow * n, 95 + slow * n) for n in range(1, 3)]
    return panel


def ssp() -> Panel:
    """With staleness=1 the fast worker waits when it would be more than one step ahead."""
    panel = Panel("pserver_ssp, staleness=1", "as async, at most staleness steps ahead of the slowest")
    fast = [(96, 146), (180, 230), (276, 326), (420, 470)]
    slow = [(96, 252), (266, 398), (412, 536)]
    panel.steps += [("worker 0", a, b, str(n + 1)) for n, (a, b) in enumerate(fast)]
    panel.steps += [("worker 1", a, b, str(n + 1)) for n, (a, b) in enumerate(slow)]
    panel.waits += [("worker 0", 230, 276), ("worker 0", 326, 420), ("worker 0", 470, 544)]
    panel.pushes += [("worker 0", b, b + 10) for _, b in fast] + [("worker 1", b, b + 8) for _, b in slow[:2]]
    panel.pulls += [("worker 0", a - 9, a) for a, _ in fast[1:]] + [("worker 1", a - 5, a) for a, _ in slow[1:]]
    panel.updates += [(time, f"v{number + 1}") for number, time in enumerate((162, 244, 262, 342, 408, 486))]
    return panel


def geo() -> Panel:
    """Each worker steps its own replica; every k_steps a difference goes there and the others' gain comes back."""
    panel = Panel("pserver_geo, k_steps=3", "own replica and optimizer; an exchange of differences every k steps")
    for number in range(9):
        start = 96 + 48 * number
        panel.steps += [("worker 0", start, start + 45, str(number + 1))]
    for number in range(7):
        start = 96 + 62 * number
        panel.steps += [("worker 1", start, start + 59, str(number + 1))]
    starts = {"worker 0": (237, 381, 525), "worker 1": (279, 465)}
    for worker, times in starts.items():
        panel.pushes += [(worker, t, t + 10) for t in times]
        panel.pulls += [(worker, t + 24, t + 36) for t in times if t < 520]
        panel.updates += [(t + 17, "+") for t in times if t < 520]
    panel.updates += [(540, "+")]
    return panel


def drawn(panel: Panel, x: int, y: int) -> list[str]:
    """The panel's elements with its upper left corner there."""
    lines = [
        f'<g transform="translate({x} {y})">',
        f'<rect x="4" y="4" width="{WIDTH - 8}" height="{HEIGHT - 8}" rx="10" fill="#fff" stroke="#bbb"/>',
    ]
    lines += [_text(16, 26, panel.title, 'font-weight="bold" font-size="14"'), _text(16, 43, panel.says, 'fill="#555"')]
    for lane, height in LANES.items():
        lines += [
            _text(16, height + 4, lane, 'fill="#333"'),
            f'<line x1="{LEFT}" y1="{height}" x2="{RIGHT}" y2="{height}" stroke="#ccc"/>',
        ]
    for lane, start, end in panel.waits:
        height = LANES[lane]
        lines += [
            (
                f'<line x1="{start}" y1="{height}" x2="{end}" y2="{height}" stroke="#c33" stroke-width="3" '
                f'stroke-dasharray="3 4"/>'
            )
        ]
    for lane, start, end, text in panel.steps:
        height = LANES[lane]
        lines += [
            (
                f'<rect x="{start}" y="{height - BOX // 2}" width="{end - start}" height="{BOX}" rx="3" '
                f'fill="{COLORS[lane]}" stroke="#555"/>'
            ),
            _text((start + end) // 2, height + 4, text, 'text-anchor="middle"'),
        ]
    for worker, start, end in panel.pushes:
        lines += [_arrow(start, LANES[worker], end, LANES["server"], "push")]
    for worker, start, end in panel.pulls:
        lines += [_arrow(start, LANES["server"], end, LANES[worker], "pull")]
    for time, text in panel.updates:
        lines += [
            f'<circle cx="{time}" cy="{LANES["server"]}" r="9" fill="{COLORS["server"]}" stroke="#555"/>',
            _text(time, LANES["server"] + 4, text, 'text-anchor="middle" font-size="10"'),
        ]
    return [*lines, "</g>"]


def _arrow(x1: int, lane1: int, x2: int, lane2: int, kind: str) -> str:
    """From the edge of a worker's box to the server's line, or back."""
    down = 1 if lane2 > lane1 else -1
    edge1 = lane1 + down * (BOX // 2 if lane1 != LANES["server"] else 9)
    edge2 = lane2 - down * (BOX // 2 if lane2 != LANES["server"] else 9)
    color = "#247" if kind == "push" else "#783"
    dashes = "" if kind == "push" else ' stroke-dasharray="4 3"'
    return (
        f'<line x1="{x1}" y1="{edge1}" x2="{x2}" y2="{edge2}" stroke="{color}" stroke-width="1.5"{dashes} '
        f'marker-end="url(#{kind})"/>'
    )


def _text(x: int, y: int, text: str, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" {extra}>{text}</text>'


def page() -> str:
    """The whole picture."""
    height = 2 * HEIGHT + 34
    heads = "".join(
        (
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        )
        for kind, color in (("push", "#247"), ("pull", "#783"))
    )
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" '
            f'font-family="Helvetica,Arial,sans-serif" font-size="12">'
        ),
        f"<defs>{heads}</defs>",
        f'<rect width="{2 * WIDTH}" height="{height}" fill="#fafafa"/>',
    ]
    for place, panel in enumerate((sync(), asynchronous(), ssp(), geo())):
        lines += drawn(panel, place % 2 * WIDTH, place // 2 * HEIGHT)
    y = 2 * HEIGHT + 18
    lines += [
        f'<line x1="20" y1="{y}" x2="52" y2="{y}" stroke="#247" stroke-width="1.5" marker-end="url(#push)"/>',
        _text(58, y + 4, "push"),
        (
            f'<line x1="120" y1="{y}" x2="152" y2="{y}" stroke="#783" stroke-width="1.5" stroke-dasharray="4 3" '
            f'marker-end="url(#pull)"/>'
        ),
        _text(158, y + 4, "parameters come back"),
        f'<line x1="310" y1="{y}" x2="342" y2="{y}" stroke="#c33" stroke-width="3" stroke-dasharray="3 4"/>',
        _text(348, y + 4, "the worker waits"),
        f'<circle cx="480" cy="{y}" r="9" fill="#ffe6b8" stroke="#555"/>',
        _text(496, y + 4, "v3: the servers' third update; +: a difference is added"),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
