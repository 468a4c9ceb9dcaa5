"""What a validation found, for people: the confusion matrix, accuracy by class, and a page of the worst mistakes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.curves import figure_of
from trainer.findings import WHICH, Findings, path_of, read
from trainer.tally import Mistake

FILES = ("confusion.png", "per_class.csv", "mistakes.csv", "mistakes.png")
MOST_NUMBERS = 20
"""Up to so many classes the confusion matrix shows its counts."""
MOST_NAMES = 52
COLUMNS = 6


def file_names(which: str) -> tuple[str, ...]:
    """The four files of the last or the best validation."""
    return FILES if which == "last" else tuple(f"{which}_{name}" for name in FILES)


def clear(run_dir: Path) -> None:
    """Remove what a run before left in the same folder."""
    for which in WHICH:
        for path in (path_of(run_dir, which), *(run_dir / name for name in file_names(which))):
            path.unlink(missing_ok=True)


def draw(run_dir: Path, names: Sequence[str], title: str) -> list[Path]:
    """The files of each validation that was kept.

    Args:
        names: of the classes; empty: they are called by their numbers.
    """
    made = []
    for which in WHICH:
        if (found := read(run_dir, which)) is None:
            continue
        confusion, by_class, mistakes, page = (run_dir / name for name in file_names(which))
        called = list(names) or [str(number) for number in range(len(found.examination.labels))]
        heading = f"{title}, {which} validation"
        _write_classes(by_class, found, called)
        _write_mistakes(mistakes, found.examination.mistakes, called)
        made += [by_class, mistakes]
        if found.examination.confusion is not None:
            _draw_confusion(confusion, found.examination.confusion, called, heading)
            made.append(confusion)
        if found.images is not None and len(found.images):
            _draw_mistakes(page, found, called, heading)
            made.append(page)
    return made


def _write_classes(path: Path, found: Findings, names: Sequence[str]) -> None:
    """A line for each class: samples, hits, guesses, accuracy (recall), precision, F1; empty where there is no sample."""
    examination = found.examination
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["class", "name", "samples", "hits", "guesses", "accuracy", "precision", "f1"])
        counts = zip(examination.labels.tolist(), examination.hits.tolist(), examination.guesses.tolist(), strict=True)
        for number, (samples, hits, guesses) in enumerate(counts):
            shares = _share(hits, samples), _share(hits, guesses), _share(2 * hits, samples + guesses)
            table.writerow([number, names[number], samples, hits, guesses, *shares])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""


def _write_mistakes(path: Path, mistakes: Sequence[Mistake], names: Sequence[str]) -> None:
    """A line for each of the worst mistakes, the greatest loss first."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sample", "label", "guess", "confidence", "loss"])
        for m in mistakes:
            table.writerow([m.number, names[m.label], _guess(m, names), f"{m.confidence:.6f}", f"{m.loss:.6f}"])


def _guess(mistake: Mistake, names: Sequence[str]) -> str:
    return names[mistake.guess] if mistake.guess >= 0 else "(none)"


def _draw_confusion(path: Path, matrix: np.ndarray, names: Sequence[str], title: str) -> None:
    """Rows are labels, columns guesses; the colour is the share of the row."""
    shown = matrix if matrix[:, -1].any() else matrix[:, :-1]
    columns = [*names, "(none)"][: shown.shape[1]]
    size = min(16.0, 4.0 + 0.35 * len(names))
    figure = figure_of((size + 1.0, size), title)
    axis = figure.subplots()
    image = axis.imshow(shown / np.maximum(shown.sum(1, keepdims=True), 1), cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axis, label="share of the label's samples", shrink=0.8)
    axis.set_xlabel("guess")
    axis.set_ylabel("label")
    if len(names) <= MOST_NAMES:
        axis.set_xticks(range(len(columns)), columns, rotation=90)
        axis.set_yticks(range(len(names)), names)
    if len(names) <= MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(shown):
            if count:
                dark = count > 0.5 * shown[row].sum()
                axis.text(
                    column, row, str(count), ha="center", va="center", fontsize=8, color="white" if dark else "black"
                )
    figure.savefig(path, dpi=110)


def _draw_mistakes(path: Path, found: Findings, names: Sequence[str], title: str) -> None:
    """Each image with its label, the guess, and the probability that the model gave the guess."""
    assert found.images is not None
    mistakes = found.examination.mistakes
    rows = -(-len(mistakes) // COLUMNS)
    figure = figure_of((2.2 * COLUMNS, 2.7 * rows + 0.5), f"{title}: the worst mistakes")
    axes: list[Any] = list(figure.subplots(rows, COLUMNS).flat)
    for axis in axes:
        axis.axis("off")
    for axis, image, mistake in zip(axes, found.images, mistakes, strict=False):
        axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray" if image.shape[-1] == 1 else None)
        guess = f"{_guess(mistake, names)} ({mistake.confidence:.0%})"
        axis.set_title(f"sample {mistake.number}\nis {names[mistake.label]}\nguess {guess}", fontsize=8)
    figure.savefig(path, dpi=110)
