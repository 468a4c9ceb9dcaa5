"""Figures of matplotlib: made without a display, and saved as a picture file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.host import files
from trainer.pictures.lettering import DPI, Ruler, families


def figure_of(size: tuple[float, float], title: str, arranged: bool = True) -> Any:
    """Make an empty matplotlib figure of this size in inches with a title, without a display.

    Args:
        arranged: its axes find their places themselves.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    fonts = families([title])
    lines = Ruler(12, fonts).wrap(title, size[0] - 0.5, 2)
    top = {} if arranged else {"y": 1.0 - 0.1 / size[1]}
    figure.suptitle(lines, fontsize=12, fontfamily=fonts, parse_math=False, **top)
    return figure


def save(figure: Any, path: Path) -> None:
    """Save a figure as a picture file, replacing what is there and following no link."""
    with files.replacing(path) as part:
        figure.savefig(part, dpi=DPI, format=path.suffix.removeprefix("."))
