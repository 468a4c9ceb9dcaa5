"""Draws a validation's findings: the confusion matrix, accuracy by class, and a page of the worst mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.metrics.confusion import Examination, Mistake
from trainer.metrics.validation_file import Findings
from trainer.pictures.figures import figure_of, save
from trainer.pictures.lettering import Ruler, drawable, families, missing
from trainer.run_folder import csv_files
from trainer.visible import printed

FILES = ("confusion.png", "per_class.csv", "mistakes.csv", "mistakes.png")
MOST_NUMBERS = 20
"""Up to so many classes the confusion matrix shows its counts."""
MOST_NAMES = 52
NAME_INCHES = 1.8
"""Room for a class's name beside the confusion matrix."""
COLUMNS = 6
CELL = 2.2
"""Inches of a mistake's place on the page."""
CAPTION = 8
"""Points of a caption's letters."""
LINE = 0.15
"""Inches of a caption's line."""
GAP, HEAD, FOOT = 0.1, 0.55, 0.45
"""Inches between images, of the title's place and of the footnote's."""
NAME_LINES = 3


def file_names(which: str) -> tuple[str, ...]:
    """The names of the four files of pictures and numbers about the last or the best validation."""
    return FILES if which == "last" else tuple(f"{which}_{name}" for name in FILES)


def draw(run_dir: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
    """Draw the pictures of a validation into the run's folder; returns their paths.

    Args:
        names: of the classes; empty: they are called by their numbers.
    """
    examination = Examination.of(found.arrays)
    confusion, by_class, mistakes, page = (run_dir / name for name in file_names(which))
    called = list(names) or [str(number) for number in range(len(examination.labels))]
    _write_classes(by_class, examination, called)
    _write_mistakes(mistakes, found, examination, called)
    made = [by_class, mistakes]
    if examination.confusion is not None:
        save(confusion_figure(examination.confusion, called, title), confusion)
        made.append(confusion)
    if found.images is not None and len(found.images):
        save(mistakes_figure(found, examination, called, title), page)
        made.append(page)
    return made


def _write_classes(path: Path, examination: Examination, names: Sequence[str]) -> None:
    """A line for each class: samples, hits, guesses, accuracy (recall), precision, F1; empty where there is no
    sample."""
    rows: list[list[Any]] = [["class", "name", "samples", "hits", "guesses", "accuracy", "precision", "f1"]]
    counts = zip(examination.labels.tolist(), examination.hits.tolist(), examination.guesses.tolist(), strict=True)
    for number, (samples, hits, guesses) in enumerate(counts):
        shares = _share(hits, samples), _share(hits, guesses), _share(2 * hits, samples + guesses)
        rows.append([number, names[number], samples, hits, guesses, *shares])
    csv_files.write(path, rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""


def _write_mistakes(path: Path, found: Findings, examination: Examination, names: Sequence[str]) -> None:
    """A line for each of the worst mistakes, the greatest loss first."""
    rows = [["file", "split", "sample", "label", "guess", "confidence", "loss"]]
    for place, m in enumerate(examination.mistakes):
        file = found.files[place] if place < len(found.files) else ""
        guess = names[m.label], _guess(m, names), f"{m.confidence:.6f}", f"{m.loss:.6f}"
        rows.append([file, found.split, str(m.number), *guess])
    csv_files.write(path, rows)


def _guess(mistake: Mistake, names: Sequence[str]) -> str:
    return names[mistake.guess] if mistake.guess >= 0 else "(none)"


def confusion_figure(matrix: np.ndarray, names: Sequence[str], title: str) -> Any:
    """The figure of the confusion matrix: rows are labels, columns are guesses, colours are shares of the row."""
    shown = matrix if matrix[:, -1].any() else matrix[:, :-1]
    names, fonts, footnote = drawable(names)
    size = min(16.0, 4.0 + 0.35 * len(names))
    figure = figure_of((size + 1.0, size), title)
    figure.supxlabel(Ruler(CAPTION, fonts).wrap(footnote, size, 3), fontsize=CAPTION)
    axis = figure.subplots()
    image = axis.imshow(shown / np.maximum(shown.sum(1, keepdims=True), 1), cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axis, label="share of the label's samples", shrink=0.8)
    axis.set_xlabel("guess")
    axis.set_ylabel("label")
    if len(names) <= MOST_NAMES:
        ruler = Ruler(10, fonts)
        called = [ruler.cut(name, NAME_INCHES) for name in [*names, "(none)"]]
        style = {"parse_math": False, "fontfamily": fonts, "fontsize": 10}
        axis.set_xticks(range(shown.shape[1]), called[: shown.shape[1]], rotation=90, **style)
        axis.set_yticks(range(len(names)), called[: len(names)], **style)
    if len(names) <= MOST_NUMBERS:
        digits = len(str(shown.max(initial=0)))
        for (row, column), count in np.ndenumerate(shown):
            if count:
                dark = count > 0.5 * shown[row].sum()
                colour = "white" if dark else "black"
                axis.text(column, row, str(count), ha="center", va="center", fontsize=min(8, 32 / digits), color=colour)
    return figure


def mistakes_figure(found: Findings, examination: Examination, names: Sequence[str], title: str) -> Any:
    """The figure of the worst mistakes: each image with its file, its label, the guess, and the guess's probability."""
    names, _, footnote = drawable(names)
    mistakes, images = examination.mistakes, found.images
    assert images is not None
    files = [printed(found.name(place, m.number)) for place, m in enumerate(mistakes)]
    fonts = families([*names, *files])
    files = [
        f"{found.split} sample {m.number}" if missing([name], fonts) or not name else name
        for name, m in zip(files, mistakes, strict=True)
    ]
    rows, columns = -(-len(mistakes) // COLUMNS), min(COLUMNS, len(mistakes))
    ruler = Ruler(CAPTION, fonts)
    captions = [_caption(name, m, names, ruler) for name, m in zip(files, mistakes, strict=True)]
    caption = max(caption.count("\n") + 1 for caption in captions) * LINE + GAP
    wide, tall = max(4.0, CELL * columns), (CELL + caption) * rows + HEAD + (FOOT if footnote else GAP)
    heading = f"{title}: the worst {'mistakes' if len(mistakes) > 1 else 'mistake'}"
    figure = figure_of((wide, tall), heading, arranged=False)
    figure.text(0.5, GAP / tall, ruler.wrap(footnote, wide - 2 * GAP, 3), ha="center", va="bottom", fontsize=CAPTION)
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(0, tall), autoscale_on=False)  # in inches
    page.axis("off")
    left = (wide - CELL * columns) / 2
    for number, (image, shown_caption) in enumerate(zip(images, captions, strict=False)):
        row, column = divmod(number, COLUMNS)
        middle, top = left + (column + 0.5) * CELL, tall - HEAD - row * (CELL + caption) - caption
        high, across = image.shape[:2]
        scale = min(CELL / high, (CELL - GAP) / across)
        place = (middle - across * scale / 2, middle + across * scale / 2, top - high * scale, top)
        grey = image.shape[-1] == 1
        shown, colours = (image.squeeze(-1), "gray") if grey else (image, None)
        page.imshow(shown, cmap=colours, extent=place, aspect="auto")
        figure.text(
            middle / wide,
            (top + GAP / 2) / tall,
            shown_caption,
            ha="center",
            va="bottom",
            fontsize=CAPTION,
            fontfamily=fonts,
            parse_math=False,
        )
    return figure


def _caption(name: str, mistake: Mistake, names: Sequence[str], ruler: Ruler) -> str:
    """Three lines, or up to nine where the names are long."""
    name = ruler.wrap(name, CELL - 2 * GAP, NAME_LINES)
    label = ruler.wrap(f"is {names[mistake.label]}", CELL - 2 * GAP, NAME_LINES)
    guess = ruler.wrap(f"guess {_guess(mistake, names)} ({mistake.confidence:.0%})", CELL - 2 * GAP, NAME_LINES)
    return f"{name}\n{label}\n{guess}"
