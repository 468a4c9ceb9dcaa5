"""metrics.jsonl on a disk that takes some bytes, then none, then all."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from trainer.host.files import REFUSED
from trainer.run_folder.points import Points


class Disk:
    """A file that takes so many bytes before it is full."""

    def __init__(self, file: Any, room: int, error: int) -> None:
        self.file, self.room, self.error = file, room, error

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(self.error, "no room")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        self.file.close()


def on_a_disk(folder: Path, room: int, error: int = errno.ENOSPC) -> tuple[Points, Disk]:
    (folder / "metrics.jsonl").write_text("before\n")
    points = Points(folder)
    points.file = disk = Disk(points.file, room, error)  # type: ignore[assignment]
    return points, disk


@pytest.mark.parametrize("error", REFUSED)
def test_lines_wait_for_room_in_their_order_whole(
    error: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(200):
        random.seed(seed)
        points, disk = on_a_disk(tmp_path, random.randrange(40), error)
        lines = ["before"]
        for number in range(12):
            lines.append(f"line {number}{'.' * random.randrange(20)}")
            points.add(lines[-1])
            disk.room += random.choice((0, 0, 0, 7, 60))
            text = "".join(f"{line}\n" for line in lines)
            assert points.size == len(text)
            assert text.startswith((tmp_path / "metrics.jsonl").read_text())
        disk.room = 10_000
        assert points.unwritten() == ""
        points.close()
        assert (tmp_path / "metrics.jsonl").read_text() == text
        said = capsys.readouterr().out
        assert said.count("ATTENTION") == said.count("is written again; no point is missing")


def test_lines_that_never_get_room_are_an_error_at_the_end(tmp_path: Path) -> None:
    points, _ = on_a_disk(tmp_path, 3)
    points.add("a line")
    assert points.unwritten() == f"{tmp_path}/metrics.jsonl: no room"
    with pytest.raises(OSError, match=r"no room: .*metrics\.jsonl"):
        points.close()


def test_another_error_is_no_full_disk(tmp_path: Path) -> None:
    points, _ = on_a_disk(tmp_path, 0, errno.EIO)
    with pytest.raises(OSError, match="no room"):
        points.add("a line")


def test_half_a_line_of_a_worker_that_is_gone_is_cut_off(tmp_path: Path) -> None:
    for before, kept in (("", ""), ("half", ""), ("one\nhal", "one\n"), ("one\ntwo\n", "one\ntwo\n")):
        (tmp_path / "metrics.jsonl").write_text(before)
        points = Points(tmp_path)
        points.add("next")
        points.close()
        assert (tmp_path / "metrics.jsonl").read_text() == f"{kept}next\n"
