"""Draws advise.png: predicted samples per second over numbers of workers, by strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trainer.pictures.figures import figure_of, save

PICTURE = "advise.png"


def draw(
    folder: Path, name: str, workers: Sequence[int], rates: Mapping[str, Sequence[float | None]], equal: Collection[str]
) -> Path:
    """Draw ``advise.png`` into a folder; returns its path.

    Args:
        rates: samples per second by candidate, for each number of ``workers``; the first is 1 worker.
        equal: candidates that are equal to the average of gradients; the others are dotted.
    """
    from matplotlib import colormaps

    figure, colours = figure_of((9, 5.5), f"{name}: predicted from 1 and 2 workers"), colormaps.get_cmap("tab20")
    axis = figure.subplots()
    base = next((found[0] for found in rates.values() if found[0] is not None), None)
    if base is not None:
        axis.plot(workers, [base * number for number in workers], "--", color="0.5", label="ideal")
    for number, (candidate, found) in enumerate(rates.items()):
        known = [(n, rate) for n, rate in zip(workers, found, strict=True) if rate is not None]
        line = "o-" if candidate in equal else "x:"
        axis.plot(
            *zip(*known, strict=True), line, color=colours(number % 20), markersize=4, linewidth=1.2, label=candidate
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(workers, [str(number) for number in workers])
    axis.minorticks_off()
    axis.set_xlabel("workers")
    axis.set_ylabel("samples per second")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save(figure, folder / PICTURE)
    return folder / PICTURE
