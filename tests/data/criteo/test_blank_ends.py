"""Blank lines at the end of a file of rows are no rows; others are, and lines keep their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.criteo.blocks import PIECE
from trainer.data.criteo.rows import CriteoRowReader
from trainer.worker.predict_rows import MOST_BLANK, chunks

ROW = b"\t".join([b"1"] * 39) + b"\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (ROW * 2, 2),
        (ROW * 2 + b"\n", 2),
        (ROW * 2 + b"\r\n\n\n", 2),
        (ROW[:-1] + b"\r\n\r\n", 1),
        (ROW + b"\n" + ROW, 3),
        (ROW + b"\n\n" + ROW + b"\n", 4),
        (b"\n\n", 0),
        (ROW + b"\n" * 2 * MOST_BLANK, 1 + 2 * MOST_BLANK),
        (ROW * (PIECE // len(ROW)) + b"\n" * 2 * len(ROW), PIECE // len(ROW)),
        (ROW * (PIECE // len(ROW)) + b"\n" * 2 * len(ROW) + ROW, PIECE // len(ROW) + 2 * len(ROW) + 1),
    ],
)
def test_blank_lines_at_the_end_are_passed_over(text: bytes, lines: int, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(text)
    found = list(chunks([tmp_path / "rows.tsv"], CriteoRowReader(hash_size=11)))
    assert sum(chunk.lines for chunk in found) == lines
    assert [chunk.line for chunk in found] == [1 + sum(c.lines for c in found[:n]) for n in range(len(found))]
    assert all(chunk.text.count(b"\n") == chunk.lines for chunk in found)
