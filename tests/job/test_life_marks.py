"""Curves mark the updates from which a run went on, and the legend says so once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.job import curves
from trainer.run_folder import lives
from trainer.run_folder.lives import LifeRecord

pytestmark = pytest.mark.usefixtures("drawn")


def test_each_life_after_the_first_is_a_line_in_every_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (
        LifeRecord(1, "", how="killed"),
        LifeRecord(2, "", how="lost", first=20),
        LifeRecord(3, "", how="failed", first=20),
    )
    lives.begin(tmp_path, before, 30, 1, "x")
    points = ({"step": n, "metrics": {"train/loss": 1.0 / n, "train/acc1": 0.5, "lr": 0.1}} for n in range(1, 50))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    figures: list[Any] = []
    monkeypatch.setattr(curves, "save", lambda figure, path: figures.append(figure))
    curves.draw(tmp_path, "title")
    [figure] = figures
    for axis in figure.axes:
        assert [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"] == [20, 30]
    told = [text.get_text() for axis in figure.axes for text in axis.get_legend().get_texts()]
    assert len(figure.axes) == 3 and told.count("resumed") == 1
