"""What a validation found is kept exactly and shown: confusion matrix, accuracy by class, worst mistakes."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainer import findings, pictures
from trainer.tally import Examination, Mistake

HITS, LABELS, GUESSES = np.array([2, 0, 1]), np.array([3, 0, 1]), np.array([2, 1, 1])
MATRIX = np.array([[2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
FOUND = Examination(
    {"f1": 0.5}, HITS, LABELS, GUESSES, MATRIX, (Mistake(7, 0, 1, 0.75, 2.5), Mistake(2, 0, -1, 0.0, 1.0))
)


def test_findings_come_back_as_they_were(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    findings.keep(tmp_path, "last", FOUND, images)
    kept = findings.read(tmp_path, "last")
    assert kept is not None and kept.images is not None
    np.testing.assert_array_equal(kept.images, images.permute(0, 2, 3, 1).numpy())
    assert kept.examination.metrics == FOUND.metrics and kept.examination.mistakes == FOUND.mistakes
    np.testing.assert_array_equal(kept.examination.confusion, MATRIX)  # type: ignore[arg-type]
    assert findings.read(tmp_path, "best") is None


def test_images_of_other_types_are_stretched_to_what_can_be_seen() -> None:
    shown = findings.pictured(torch.tensor([[[[0.25, 0.5], [0.5, 0.75]]], [[[-1.0, 1.0], [0.0, 1.0]]]]))
    assert shown is not None and shown[..., 0].tolist() == [[[0, 128], [128, 255]], [[0, 255], [128, 255]]]
    assert findings.pictured(torch.zeros(2, 5)) is None and findings.pictured({"dense": torch.zeros(2, 5)}) is None
    assert findings.pictured(torch.zeros(2, 7, 4, 4)) is None and findings.pictured(None) is None


@pytest.mark.parametrize("which", ["last", "best"])
def test_every_file_is_made_and_says_what_was_found(tmp_path: Path, which: str) -> None:
    red_and_blue = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    red_and_blue[0, 0], red_and_blue[1, 2] = 255, 255
    findings.keep(tmp_path, which, FOUND, red_and_blue)
    made = pictures.draw(tmp_path, ["rose", "lily", "iris"], "a run")
    confusion, by_class, mistakes, page = (tmp_path / name for name in pictures.file_names(which))
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
    assert [(r["sample"], r["label"], r["guess"], r["confidence"]) for r in worst] == [
        ("7", "rose", "lily", "0.750000"), ("2", "rose", "(none)", "0.000000"),
    ]  # fmt: skip
    pictures.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_classes_are_drawn_without_their_names(tmp_path: Path) -> None:
    eye = np.concatenate([np.eye(102, dtype=np.int64), np.zeros((102, 1), dtype=np.int64)], 1)
    ones = np.ones(102, dtype=np.int64)
    findings.keep(tmp_path, "last", Examination({}, ones, ones, ones, eye, ()), None)
    assert {path.name for path in pictures.draw(tmp_path, [], "")} == {"confusion.png", "per_class.csv", "mistakes.csv"}
