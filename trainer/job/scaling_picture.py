"""Draws scaling.png: samples per second and efficiency over numbers of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.pictures.figures import figure_of, save

PICTURE = "scaling.png"


def draw(folder: Path, name: str, rows: Sequence[Mapping[str, float | None]], reference: tuple[int, float]) -> Path:
    """Draw ``scaling.png`` into a folder; returns its path.

    Args:
        rows: as in ``scaling.json``. reference: devices and efficiency of the reference.
    """
    figure = figure_of((11, 4.5), f"{name}: scaling on one host")
    rates, shares = figure.subplots(1, 2)
    workers = [row["workers"] for row in rows]
    base = rows[0]["samples_per_s"] / rows[0]["workers"]  # type: ignore[operator]
    rates.plot(workers, [base * number for number in workers], "--", color="0.5", label="ideal")  # type: ignore[operator]
    shares.axhline(1.0, linestyle="--", color="0.5", label="ideal")
    apart = [row for row in rows if row["samples_per_s_apart"] is not None]
    beside = [row["workers"] for row in apart]
    rates.plot(beside, [row["samples_per_s_apart"] for row in apart], "s:", color="C1", label="exchanging nothing")
    shares.plot(beside, [row["efficiency_apart"] for row in apart], "s:", color="C1", label="exchanging nothing")
    rates.plot(workers, [row["samples_per_s"] for row in rows], "o-", color="C0", label="training")
    shares.plot(workers, [row["efficiency"] for row in rows], "o-", color="C0", label="training")
    at, efficiency = reference
    label = f"the reference's {efficiency} at {at} devices"
    shares.axhline(efficiency, linestyle="-.", linewidth=0.8, color="C2", label=label)
    for axis, title in ((rates, "samples per second"), (shares, "efficiency")):
        axis.set_xlabel("workers")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.set_xticks(workers)
        axis.grid(alpha=0.3)
        axis.legend()
    save(figure, folder / PICTURE)
    return folder / PICTURE
