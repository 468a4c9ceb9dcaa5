"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trainer.host import private
from trainer.host.files import PART, PRIVATE, replace_file, replacing


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("ne")
        assert path.read_text() == "old"
        [found] = PART.findall(part.name)
        assert found == path.name and part.parent == path.parent
        part.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as part, part.open("w") as file:
        file.write("ne")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    for name in ("one", "two", "three"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "one") as part:
        part.write_text("new")
    replace_file(tmp_path / "two", "new")
    private.write(tmp_path / "three", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert [(tmp_path / name).read_text() for name in ("one", "two", "three")] == ["new"] * 3
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


def test_a_private_file_is_never_anybody_elses(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with replacing(tmp_path / "config", PRIVATE) as part:
            assert stat.S_IMODE(part.stat().st_mode) == 0o600, "while it is written"
        replace_file(tmp_path / "other", "x", private=True)
        private.write(tmp_path / "third", "x")
        replace_file(tmp_path / "common", "x")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"config": 0o600, "other": 0o600, "third": 0o600, "common": 0o666}
