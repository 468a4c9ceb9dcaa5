"""What a validation found is kept exactly and shown: confusion matrix, accuracy by class, worst mistakes."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.data.drawn_flowers import species as flower_species
from trainer.job import curves
from trainer.metrics import validation_file
from trainer.metrics.confusion import Examination, Mistake
from trainer.pictures import lettering
from trainer.pictures.lettering import Ruler
from trainer.run_folder import leftovers
from trainer.tasks import class_pictures as validation

pytestmark = pytest.mark.usefixtures("drawn")

HITS, LABELS, GUESSES = np.array([2, 0, 1]), np.array([3, 0, 1]), np.array([2, 1, 1])
MATRIX = np.array([[2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
FOUND = Examination(
    {"f1": 0.5}, HITS, LABELS, GUESSES, MATRIX, (Mistake(7, 0, 1, 0.75, 2.5), Mistake(2, 0, -1, 0.0, 1.0))
)


def drawn(folder: Path, which: str, names: list[str], title: str) -> list[Path]:
    found = validation_file.read(folder, which)
    assert found is not None
    return validation.draw(folder, which, found, names, title)


def test_findings_come_back_as_they_were(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    validation_file.keep(tmp_path, "last", FOUND.arrays(), images, ["val/é/7.jpg", ""], "test")
    kept = validation_file.read(tmp_path, "last")
    assert kept is not None and kept.images is not None
    assert (kept.name(0, 7), kept.name(1, 2), kept.split) == ("val/é/7.jpg", "test sample 2", "test")
    np.testing.assert_array_equal(kept.images, images.permute(0, 2, 3, 1).numpy())
    examination = Examination.of(kept.arrays)
    assert examination.metrics == FOUND.metrics and examination.mistakes == FOUND.mistakes
    np.testing.assert_array_equal(examination.confusion, MATRIX)  # type: ignore[arg-type]
    assert validation_file.read(tmp_path, "best") is None


def test_images_of_other_types_are_stretched_to_what_can_be_seen() -> None:
    shown = validation_file.pictured(torch.tensor([[[[0.25, 0.5], [0.5, 0.75]]], [[[-1.0, 1.0], [0.0, 1.0]]]]))
    assert shown is not None and shown[..., 0].tolist() == [[[0, 128], [128, 255]], [[0, 255], [128, 255]]]
    assert (
        validation_file.pictured(torch.zeros(2, 5)) is None
        and validation_file.pictured({"dense": torch.zeros(2, 5)}) is None
    )
    assert validation_file.pictured(torch.zeros(2, 7, 4, 4)) is None and validation_file.pictured(None) is None


@pytest.mark.parametrize("which", ["last", "best"])
def test_every_file_is_made_and_says_what_was_found(tmp_path: Path, which: str) -> None:
    red_and_blue = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    red_and_blue[0, 0], red_and_blue[1, 2] = 255, 255
    validation_file.keep(tmp_path, which, FOUND.arrays(), red_and_blue, ["val/rose/7.jpg", ""])
    made = drawn(tmp_path, which, ["rose", "lily", "iris"], "a run")
    confusion, by_class, mistakes, page = (tmp_path / name for name in validation.file_names(which))
    assert set(made) == {confusion, by_class, mistakes, page}
    assert len(set(Image.open(confusion).convert("L").tobytes())) > 50, "shades of blue"
    seen = np.asarray(Image.open(page).convert("RGB")).reshape(-1, 3)
    for colour in ([255, 0, 0], [0, 0, 255]):
        assert (seen == colour).all(1).sum() > 10_000, "each mistake's image is on the page"
    rows = list(csv.DictReader(by_class.open()))
    assert [row["name"] for row in rows] == ["rose", "lily", "iris"]
    assert [row["accuracy"] for row in rows] == ["0.666667", "", "1.000000"]
    assert [row["f1"] for row in rows] == ["0.800000", "0.000000", "1.000000"]
    worst = list(csv.DictReader(mistakes.open()))
    assert [tuple(row.values())[:-1] for row in worst] == [
        ("val/rose/7.jpg", "val", "7", "rose", "lily", "0.750000"),
        ("", "val", "2", "rose", "(none)", "0.000000"),
    ]
    leftovers.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_classes_are_drawn_without_their_names(tmp_path: Path) -> None:
    eye = np.concatenate([np.eye(102, dtype=np.int64), np.zeros((102, 1), dtype=np.int64)], 1)
    ones = np.ones(102, dtype=np.int64)
    validation_file.keep(tmp_path, "last", Examination({}, ones, ones, ones, eye, ()).arrays(), None)
    assert {path.name for path in drawn(tmp_path, "last", [], "")} == {"confusion.png", "per_class.csv", "mistakes.csv"}


NAMES = {
    "the demo's own": [species.name for species in flower_species.species()],
    "60 letters": [f"a class with a name of sixty letters, of which this is no. {n}" for n in range(9)],
    "one word": ["w" * 60 + str(n) for n in range(9)],
    "other scripts": ["שושנה אדומה יפה מאוד " * 3, "وردة حمراء جميلة جدا " * 3, "普通报春花" * 12, "プリムローズ" * 10],
    "formulas": ["$x^2$ " * 9, "\\frac{ $ " * 9, "_" * 60, "a\nb\tc\x1b[31m" * 6],
    "endless": ["n" * 100_000, "m" * 100_000],
    "short": ["a", "b"],
}


CASES = [("the demo's own", 24), *((name, many) for name in NAMES for many in (7, 1))]


@pytest.mark.parametrize(("names", "many"), CASES, ids=str)
@pytest.mark.filterwarnings("error")
def test_captions_never_overlap(names: str, many: int) -> None:
    files = ["", "val/rose/img_7.jpg", f"{'deep/' * 60}img_7.jpg", f"{'w' * 200}img_7", "\U00013000.jpg"]
    called, none = NAMES[names], np.zeros((many, 8, 8, 3), dtype=np.uint8)
    wrong = [Mistake(10_000 + n, n % len(called), (n + 1) % len(called), 1.0, 2.5) for n in range(many)]
    ones = np.ones(1, dtype=np.int64)
    examination = Examination({}, ones, ones, ones, None, tuple(wrong))
    found = validation_file.Findings(examination.arrays(), none, tuple(files[:many]))
    figure = validation.mistakes_figure(found, examination, called, "a title " * 20)
    figure.canvas.draw()
    texts = [text.get_window_extent() for text in figure.texts if text.get_text()]
    shown = ["".join(text.get_text().split("\n")) for text in figure.texts]
    assert sum("val sample 1" in text or "img_7" in text for text in shown) == many
    boxes = [*texts, *(image.get_window_extent() for axis in figure.axes for image in axis.images)]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height


def test_a_name_is_whole_where_it_fits_and_else_has_its_beginning_and_end() -> None:
    ruler = Ruler(8, ["DejaVu Sans"])
    assert ruler.wrap("white strap daisy", 2.0, 3) == "white strap daisy"
    wrapped = ruler.wrap("the first word, " + "many words in between, " * 20 + "the last word", 2.0, 3)
    assert wrapped.startswith("the first word") and wrapped.endswith("the last word") and "…" in wrapped
    assert all(ruler.inches(line) <= 2.0 for line in wrapped.split("\n")) and wrapped.count("\n") == 2
    for name in NAMES["the demo's own"]:
        assert (
            ruler.wrap(f"guess {name} (100%)", validation.CELL - 2 * validation.GAP, validation.NAME_LINES).split()
            == f"guess {name} (100%)".split()
        )


def test_names_in_letters_that_no_font_has_are_numbers_and_the_picture_says_so() -> None:
    shown, _, footnote = lettering.drawable(["rose", "\U00012000" * 3])  # cuneiform
    assert shown == ["rose", "class 1"] and "per_class.csv" in footnote
    assert lettering.drawable(["rose", "lily"])[2] == ""


@pytest.mark.parametrize("names", [["rose"], ["n" * 60 + str(n) for n in range(52)]], ids=["one", "fifty-two"])
@pytest.mark.filterwarnings("error")
def test_the_matrix_keeps_its_room_beside_long_names(names: list[str]) -> None:
    matrix = np.concatenate(
        [np.eye(len(names), dtype=np.int64) * 1_000_000, np.ones((len(names), 1), dtype=np.int64)], 1
    )
    figure = validation.confusion_figure(matrix, names, "a run")
    figure.canvas.draw()
    [matrix_axis, _] = figure.axes
    assert matrix_axis.bbox.width > 0.5 * figure.bbox.width
    labels = [label.get_window_extent() for label in matrix_axis.get_yticklabels()]
    assert min(box.x0 for box in labels) > 0, "no name is cut off by the picture's edge"
    for upper, lower in itertools.pairwise(labels):
        assert upper.y0 >= lower.y1 - 1 or upper.y1 <= lower.y0 + 1


POINT = {"train/loss": 1.0, "train/acc1": 0.5, "lr": 0.1, "perf/samples_per_s": 10.0}
SERVERS = {
    f"server{n}/{what}": value
    for n in (0, 1)
    for what, value in (("pushes_per_s", 2.0), ("mb_per_s", 1.0), ("rows", 0.0))
}


def _left(folder: Path, points: list[tuple[int, dict[str, float]]], staleness: list[dict[str, int]] = []) -> Path:  # noqa: B006
    lines = [json.dumps({"time": 0, "step": step, "epoch": 0, "metrics": metrics}) for step, metrics in points]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"time": 1, "st']))
    for number, counts in enumerate(staleness):
        (folder / f"server.{number}.json").write_text(json.dumps({"server": number, "staleness": counts}))
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, dpi, format: (figures.append(figure), figure.canvas.draw())
    )
    return figures


def _whole(axis: Any) -> bool:
    """The ticks that are drawn are whole numbers."""
    left, right = axis.get_xlim()
    return all(float(tick).is_integer() for tick in axis.get_xticks() if left <= tick <= right)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [[3], [1, 2, 3], [7, 8], list(range(1, 4000, 7))], ids=len)
def test_update_axes_are_whole_and_a_point_alone_is_seen(steps: list[int], tmp_path: Path, seen: list[Any]) -> None:
    curves.draw(
        _left(tmp_path, [(step, POINT) for step in steps] + [(steps[-1], {"val/loss": 0.5})]), "a run, 1 worker"
    )
    [figure] = seen
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "accuracy", "samples per second", "learning rate"]
    for axis in figure.axes:
        assert axis.lines and _whole(axis)
        for line in axis.lines:
            assert line.get_marker() == "o" or len(line.get_xdata()) > 1
    [val] = [line for line in figure.axes[0].lines if line.get_label() == "val/loss"]
    assert val.get_marker() == "o"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("points", "staleness", "panels"),
    [
        ([(3, POINT | SERVERS)], [{}, {}], ["pushes per second", "MB per second"]),
        ([(3, POINT | SERVERS)], [{"0": 4}, {}], ["pushes per second", "MB per second", "pushes"]),
        (
            [(3, SERVERS | {"server0/rows": 5.0})],
            [{"1": 4}],
            ["pushes per second", "MB per second", "rows of tables", "pushes"],
        ),
        ([], [{}], None),
        ([], [{"0": 3, "2": 1}], ["pushes"]),
        ([(1, {"server0/pushes_per_s": float("nan")})], [{"0": 3}], ["pushes"]),
    ],
    ids=["sync", "stale", "with tables", "nothing", "too short for points", "no numbers"],
)
def test_servers_have_no_empty_panel(
    points: list[tuple[int, dict[str, float]]],
    staleness: list[dict[str, int]],
    panels: list[str] | None,
    tmp_path: Path,
    seen: list[Any],
) -> None:
    drawn = curves.draw_servers(_left(tmp_path, points, staleness), "a run")
    assert (drawn is None) == (panels is None)
    if panels is not None:
        [figure] = seen
        assert [axis.get_ylabel() for axis in figure.axes] == panels
        assert all((axis.lines or axis.patches) and _whole(axis) for axis in figure.axes)
        assert all(line.get_marker() == "o" for axis in figure.axes for line in axis.lines), "of one point each"


def test_rates_are_told_from_zero_on_and_as_long_as_workers_push(tmp_path: Path, seen: list[Any]) -> None:
    """Two rates that hardly differ are no fall, and after the last update nothing is pushed."""
    points = [(step, {"server0/pushes_per_s": 40.0 + step / 100, "server0/rows": 7.0 + step}) for step in (1, 2, 3)]
    rest = (3, {"server0/pushes_per_s": 0.0, "server0/rows": 10.0})
    curves.draw_servers(_left(tmp_path, [*points, rest], [{}]), "a run")
    [figure] = seen
    pushes, rows = figure.axes
    assert pushes.lines[0].get_ydata().tolist() == [40.01, 40.02, 40.03] and pushes.get_ylim()[0] == 0.0
    assert rows.lines[0].get_ydata().tolist() == [8.0, 9.0, 10.0] and rows.get_ylim()[0] > 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1.0, 1e-9, 12_345_678.9, 1e300])
def test_panels_and_their_numbers_have_room_whatever_the_values(scale: float, tmp_path: Path, seen: list[Any]) -> None:
    points = [(step, {n: v * scale * (1 + 1e-7 * step) for n, v in POINT.items()}) for step in (1, 10_000_000)]
    curves.draw(_left(tmp_path, points), "a long title of a run with a long name " * 9)
    [figure] = seen
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    title = next(text for text in figure.texts if text.get_text())
    for one, other in itertools.combinations([*boxes, title.get_window_extent()], 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
