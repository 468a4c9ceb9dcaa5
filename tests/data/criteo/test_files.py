"""Every row of the files is read exactly once, whatever the blocks, the packing and the mistakes in them."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pictures import config
from trainer.config.schema import SyntheticCriteoData
from trainer.data.criteo.blocks import Block, RowCounts, SplitRows, blocks_of, pieces
from trainer.data.criteo.files import find
from trainer.data.criteo.row_stream import CriteoBlocks
from trainer.data.criteo.source import Criteo
from trainer.data.criteo.synthetic import SyntheticCriteo
from trainer.data.leased_blocks import LeasedRows
from trainer.errors import UserError
from trainer.strategies.contract import Lease

CONFIG = {
    "val_path": None,
    "val_fraction": 0.25,
    "hash_size": 1000,
    "cache": True,
    "block_mib": 1,
    "max_bad_fraction": 0.01,
    "num_classes": 2,
    "cache_dir": None,
}


def row(number: int) -> bytes:
    """A row whose first integer is its number."""
    return b"\t".join([b"%d" % (number % 2), b"%d" % number, *[b""] * 12, *[b"%x" % (number * 7)] * 26])


def text(numbers: range, end: bytes = b"\n") -> bytes:
    return b"\n".join(map(row, numbers)) + end


def numbers(dense: np.ndarray) -> list[int]:
    return [round(float(x) * 20) for x in dense[:, 0]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows 0-99 in a file without a newline at its end, 100-149 in a packed one."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_bytes(text(range(100), b""))
    (data / "b.txt.gz").write_bytes(gzip.compress(text(range(100, 150))))
    (data / ".hidden").write_text("x")
    return data


def blocks(folder: Path, size: int = 1000, part: SplitRows | None = None) -> CriteoBlocks:
    return CriteoBlocks(find(str(folder), "data.path"), 1000, part or SplitRows(), size, 0.01)


def read(data: CriteoBlocks, block: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All rows of a block as one batch."""
    nothing = {"dense": torch.zeros((0, 13)), "sparse": torch.zeros((0, 26), dtype=torch.int64)}
    chunks = [(nothing, torch.zeros(0, dtype=torch.int64)), *data.read_chunks(block)]
    inputs = {name: torch.cat([chunk[0][name] for chunk in chunks]) for name in nothing}
    return inputs, torch.cat([labels for _, labels in chunks])


@pytest.mark.parametrize("size", [1, 37, 100, 129, 1000, 10**6])
def test_every_row_is_in_exactly_one_block(folder: Path, size: int) -> None:
    data = blocks(folder, size)
    batches = [read(data, n) for n in range(data.blocks())]
    assert [n for inputs, _ in batches for n in numbers(inputs["dense"].numpy())] == list(range(150))
    assert all(inputs["sparse"].shape == (len(labels), 26) for inputs, labels in batches)
    assert [int(label) for _, labels in batches for label in labels] == [n % 2 for n in range(150)]


def test_pieces_are_cut_at_lines_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(text(range(50)))
    monkeypatch.setattr("trainer.data.criteo.blocks.PIECE", 64)
    cut = list(pieces(Block(path, 0, 0, None)))
    assert b"".join(piece for _, piece in cut) == path.read_bytes()
    assert all(piece.endswith(b"\n") and len(piece) < 300 for _, piece in cut)
    assert [place for place, _ in cut] == np.cumsum([0] + [len(p) for _, p in cut[:-1]]).tolist()


@pytest.mark.parametrize("size", [64, 1000, 10**6])
def test_the_held_out_rows_are_the_same_however_they_are_read(folder: Path, size: int) -> None:
    held = [blocks(folder, size, SplitRows(0.3, held_out)) for held_out in (False, True)]
    train, val = ([n for b in range(d.blocks()) for n in numbers(read(d, b)[0]["dense"].numpy())] for d in held)
    assert sorted(train + val) == list(range(150))
    assert 20 < len(val) < 70
    whole = blocks(folder, 10**7, SplitRows(0.3, True))
    assert val == [n for b in range(2) for n in numbers(read(whole, b)[0]["dense"].numpy())]


def test_bad_lines_of_a_stream_are_told_with_their_names_at_the_end_of_each_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = text(range(3000)).splitlines(keepends=True)
    for bad in (41, 42, 2000, 2001, 2002, 2003, 2004):
        lines[bad] = b"5" + lines[bad][1:]
    path = tmp_path / "rows.txt"
    path.write_bytes(b"".join(lines))
    whole = CriteoBlocks([path], 1000, SplitRows(), 1 << 14, 0.2)
    work = LeasedRows(whole, 8, 0, False, lambda epoch, blocks: (Lease(n) for n in range(blocks)))
    for epoch in (0, 1):
        read = [batch for lease in work.leases(epoch) for batch in work.read(epoch, lease)]
        assert sum(len(labels) for _, labels in read) == 2993
        [said] = capfd.readouterr().out.splitlines()
        assert said.startswith(f"epoch {epoch}: 7 of 3000 lines are malformed and left out, the first: {path}:42: ")
        assert f"{path}:43: " in said and said.count(f"{path}") == 5
    path.write_bytes(text(range(100)))
    assert not [1 for lease in LeasedRows(blocks(path), 8, 0, False, work.lease_blocks).leases(2) if lease is None]
    assert not capfd.readouterr().out


def source(path: object, **changed: object) -> Criteo:
    return Criteo(**{**CONFIG, "path": str(path), **changed})


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def test_cache_holds_the_rows_by_number(folder: Path) -> None:
    data = source(folder)
    guess = data.facts(8)
    facts = data.prepare(guess, quiet)
    assert abs(guess.train_samples - facts.train_samples) < 30
    assert facts.train_samples + facts.val_samples == 150 and data.facts(8) == facts
    splits = data.open(facts)
    found = []
    for split in (splits.train, splits.val):
        inputs, labels = split.batch(np.arange(len(split)))
        assert inputs["sparse"].dtype == labels.dtype and inputs["sparse"].shape == (len(split), 26)
        found += numbers(inputs["dense"].numpy())
    assert sorted(found) == list(range(150))


def test_streaming_and_cache_have_the_same_rows(folder: Path) -> None:
    cached, streamed = source(folder), source(folder, cache=False)
    assert streamed.facts(8).streams and not cached.facts(8).streams
    one, other = (s.open(s.prepare(s.facts(8), quiet)) for s in (cached, streamed))
    rows = [n for b in range(other.train.blocks()) for n in numbers(read(other.train, b)[0]["dense"].numpy())]
    assert rows == numbers(one.train.batch(np.arange(len(one.train)))[0]["dense"].numpy())
    assert numbers(other.val.batch(np.arange(len(other.val)))[0]["dense"].numpy()) == numbers(
        one.val.batch(np.arange(len(one.val)))[0]["dense"].numpy()
    )


def test_the_cache_is_written_once_and_anew_when_a_file_changes(folder: Path, cache: Path) -> None:
    source(folder).prepare(source(folder).facts(8), quiet)
    (made,) = (p for p in (cache / "criteo").iterdir() if p.is_dir())
    before = (made / "complete.json").stat().st_mtime_ns
    source(folder).prepare(source(folder).facts(8), quiet)
    assert (made / "complete.json").stat().st_mtime_ns == before
    (folder / "a.txt").write_bytes(text(range(90)))
    os.utime(folder / "a.txt", ns=(1, 1))
    facts = source(folder).prepare(source(folder).facts(8), quiet)
    assert facts.train_samples + facts.val_samples == 140


def test_few_bad_lines_are_left_out_and_many_are_refused(folder: Path, cache: Path) -> None:
    lines = text(range(1000)).splitlines(keepends=True)
    lines[41] = b"5" + lines[41][1:]
    (folder / "a.txt").write_bytes(b"".join(lines))
    facts = source(folder).prepare(source(folder).facts(8), quiet)
    assert facts.train_samples + facts.val_samples == 1049
    for number in range(100, 160):
        lines[number] = b"no row\n"
    (folder / "a.txt").write_bytes(b"".join(lines))
    with pytest.raises(
        UserError,
        match=(
            r"61 of 1050 lines.*a.txt:42: the label is '5', not 0 or 1; .*a.txt:101: 1 field instead of 40.*Type "
            r"instead: data.max_bad_fraction=0.064"
        ),
    ):
        source(folder).prepare(source(folder).facts(8), quiet)
    assert len([p for p in (cache / "criteo").iterdir() if p.is_dir()]) == 1
    facts = source(folder, max_bad_fraction=0.1).prepare(source(folder).facts(8), quiet)
    assert facts.train_samples + facts.val_samples == 989
    with pytest.raises(UserError, match=r"data\.max_bad_fraction=0\.01"):
        source(folder).prepare(facts, quiet)


def test_a_streamed_block_with_many_bad_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text(range(50)) + b"x\n" * 60)
    with pytest.raises(UserError, match=r"60 of 110 lines.*a:51: 1 field"):
        read(blocks(tmp_path / "a", 10**6), 0)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_broken_gz_is_named(tmp_path: Path, cut: int) -> None:
    whole = gzip.compress(text(range(5000)))
    (tmp_path / "a.gz").write_bytes(whole[:-cut] if cut > 1 else whole[: len(whole) // 2] + b"xx" * 20)
    with pytest.raises(UserError, match=r"a.gz: cannot be read"):
        list(blocks(tmp_path / "a.gz").read_chunks(0))


def test_what_is_no_file_of_rows_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_text("plain")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "table.csv").write_text("a,b\n" * 500)
    for path, why in (("nowhere", "no such file"), ("a.gz", "no gzip file"), ("empty.txt", "is empty")):
        with pytest.raises(UserError, match=f"{path}: .*{why}"):
            source(tmp_path / path).facts(8)
    with pytest.raises(UserError, match=r"not in Criteo's format.*table.csv:1: 1 field instead of 40"):
        source(tmp_path / "table.csv").facts(8)
    assert not (tmp_path / "cache").exists()


def test_a_list_and_a_pattern_name_each_file_once(folder: Path) -> None:
    found = find([str(folder / "*.txt"), str(folder), str(folder / "a.txt")], "data.path")
    assert [p.name for p in found] == ["a.txt", "b.txt.gz"]
    assert [b.number for b in blocks_of(found, 5000)] == [0, 0, 1] or len(blocks_of(found, 5000)) >= 2
    assert RowCounts().named == []


def test_the_fingerprint_is_of_what_the_files_are_and_not_of_their_place_and_time(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path, **changed: object) -> str:
        one = source(path, **changed)
        return one.fingerprint(one.facts(1))

    before = digest(folder)
    shutil.copytree(folder, tmp_path / "moved")
    for path in (tmp_path / "moved").iterdir():
        os.utime(path, (1, 1))
    assert digest(tmp_path / "moved") == digest(tmp_path / "moved", cache=False) == before
    assert len({before, digest(folder, val_fraction=0.4), digest(folder, hash_size=7)}) == 3
    with (tmp_path / "moved" / "a.txt").open("ab") as more:
        more.write(b"\n" + row(9))
    assert digest(tmp_path / "moved", cache=False) != before


def test_the_fingerprint_of_drawn_rows_is_of_what_they_are_drawn_from(tmp_path: Path) -> None:
    def drawn(**changed: object) -> SyntheticCriteo:
        return SyntheticCriteo(**config(SyntheticCriteoData, train_rows=50, val_rows=10, **changed))

    one = drawn(cache_dir=str(tmp_path / "one"))
    before = one.fingerprint(one.facts(1))
    assert one.fingerprint(one.prepare(one.facts(1), quiet)) == before
    assert drawn(cache_dir=str(tmp_path / "other")).fingerprint(one.facts(1)) == before
    assert drawn(draw_seed=7).fingerprint(one.facts(1)) != before


def test_numbers_of_rows_are_called_estimates_until_they_are_counted(folder: Path) -> None:
    clicks = source(folder, val_path=None, val_fraction=0.3)
    guess = clicks.facts(10)
    assert guess.sizes == f"about {guess.train_samples} training and about {guess.val_samples} validation samples"
    found = clicks.prepare(guess, lambda *progress: None)
    assert found.train_samples + found.val_samples == 150
    assert found.sizes == f"{found.train_samples} training and {found.val_samples} validation samples"
    assert clicks.facts(10) == found
