"""Checkpoints whose parts of servers have changed rows alone, beside a link to a full part: each is whole by itself,
wherever a process dies, and whatever becomes of the ones before."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint import disk, saving
from tests.notes import Notes
from tests.simulation import servers
from tests.strategies.pserver.played import Played
from tests.strategies.pserver.states import whole
from trainer.checkpoint import durable_folder, store, tensor_tree
from trainer.config.schema import CheckpointConfig
from trainer.strategies.pserver.protocol.messages import Verb, text
from trainer.strategies.pserver.server import increments
from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.weights.server_files import SINCE, ServerFile, full_name, parts_of

Truth = dict[str, torch.Tensor]
TABLE = {"number": 1, "name": "t", "dim": 2, "rows": None, "init": "uniform", "scale": 0.1}


@pytest.fixture(autouse=True)
def of_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(increments, "LEAST", 1)


class Run:
    """A server with a table, and the worker that completes its checkpoints in a run's folder."""

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.folder, self.checkpoints, self.keep_last = folder, folder / "checkpoints", keep_last
        self.lives, self.step, self.draw = 1, 0, np.random.default_rng(0)
        self.server = Played(folder, Notes())
        self.server.starts(TABLE)
        self.push(range(100))
        self.truths: dict[int, Truth] = {}

    @property
    def table(self) -> SparseTable:
        shard, _ = self.server.server.parameters.opened()
        return shard.tables[1]

    def push(self, ids: range | list[int]) -> None:
        self.step += 1
        which = np.array(sorted(ids), dtype=np.int64)
        gradients = torch.from_numpy(self.draw.random((len(which), 2)))
        self.table.push(which, gradients, 0.1, self.step, self.step)
        shard, _ = self.server.server.parameters.opened()
        shard.version += 1

    def shrink(self, age: int) -> None:
        self.table.shrink(self.step - age)

    def save(self, complete: bool = True) -> Path:
        """A checkpoint after the updates so far; returns its folder."""
        folder = store.folder_of(self.checkpoints, self.step)
        where = text({"folder": f"checkpoints/{folder.name}", "checkpoint": True})
        rank = 1 if self.lives > 1 else 0
        assert self.server.asks(rank, Verb.SAVE, where).verb == Verb.DONE
        self.truths[self.step] = whole(self.table.state())
        if complete:
            first = saving.saver(self.checkpoints, keep_last=self.keep_last)
            parts = [store.part_of(0), "server-0.safetensors"]
            packed = tensor_tree.Packed(saving.state(self.step, 1))
            first._write(saving.RUN, folder, packed, saving.about(self.step), parts, 0.0)
        else:
            durable_folder.begin(folder)
        return folder

    def go_back(self, folder: Path) -> None:
        """The server dies, and all go back to a checkpoint."""
        self.lives += 1
        self.server = Played(self.folder, Notes(), self.lives, str(folder))
        self.server.starts(TABLE)

    def check(self, folder: Path) -> ServerFile:
        """A checkpoint says of the table what the server had."""
        return check(folder, self.truths)


def check(folder: Path, truths: dict[int, Truth]) -> ServerFile:
    """A whole checkpoint has what the server had after that update."""
    [part] = parts_of(store.check(folder))
    truth = truths[store.about(folder).step]
    for name, tensor in truth.items():
        assert torch.equal(part[f"table|t|{name}"], tensor), f"{name} in {folder}"
    return part


def is_increment(folder: Path) -> bool:
    return SINCE in parts_of(folder)[0].meta


def test_each_checkpoint_is_what_the_server_was_whatever_becomes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are given up and removed, rows come and go, and the server is started again from one of them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power goes here
    kinds: Counter[str] = Counter()
    for seed in range(4):
        draw, run = random.Random(seed), Run(tmp_path / str(seed), keep_last=seed % 3 + 1)
        for _ in range(25):
            for _ in range(draw.randrange(3)):
                run.push(draw.sample(range(140), draw.choice((1, 5, 60))))
            if draw.random() < 0.1:
                run.shrink(draw.choice((3, 9)))
            run.push([draw.randrange(200)])
            folder = run.save(complete := draw.random() < 0.8)
            kinds["given up"] += not complete
            if complete:
                kinds["increment" if is_increment(folder) else "full"] += 1
            for kept in store.found(run.checkpoints):
                run.check(kept)
            if draw.random() < 0.05 and (newest := store.newest_whole(run.checkpoints)) is not None:
                kinds["went back to an increment" if is_increment(newest) else "went back to a full part"] += 1
                run.go_back(newest)
                mine, truth = whole(run.table.state()), run.truths[store.about(newest).step]
                assert all(torch.equal(mine[name], truth[name]) for name in truth)
    assert kinds.pop("went back to an increment") and kinds.pop("went back to a full part")
    assert min(kinds.values()) > 5, kinds


def test_what_was_saved_is_linked_and_not_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.save()
    inode = (first / "server-0.safetensors").stat().st_ino
    assert not is_increment(first)
    run.push([3, 500])
    second = run.save()
    run.push([4])
    third = run.save()
    assert is_increment(second) and is_increment(third) and not first.exists()
    assert {(folder / full_name(0)).stat().st_ino for folder in (second, third)} == {inode}
    part = run.check(third)
    assert part._file.get_tensor("table|t|ids").tolist() == [3, 4, 500]


def test_a_full_part_comes_when_an_increment_would_be_larger_than_the_average(tmp_path: Path) -> None:
    run = Run(tmp_path)
    shares, kinds = (10, 10, 10, 10, 10, 10, 10), []
    run.save()
    for number, count in enumerate(shares):
        run.push(range(10 * number, 10 * number + count))
        kinds.append(is_increment(run.save()))
    # 1, then 0.1, 0.2, 0.3, 0.4 of it: the average is 0.4 then, and 0.5 would raise it
    assert kinds == [True, True, True, True, False, True, True]


def test_an_increment_is_no_larger_than_half_of_the_rows() -> None:
    """A reader has to put both together, also where the average is higher: a full part was just written."""
    kept = increments.Increments(0, 1, True)
    kept.shares = [1.0]
    assert kept.pays(0.5) and not kept.pays(0.51)


@pytest.mark.parametrize("why", ["given up", "another life", "not whole", "no link"])
def test_without_a_full_part_that_is_sure_a_full_one_is_written(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    first = run.save(complete=why != "given up")
    if why == "another life":
        run.go_back(first)
    if why == "not whole":
        (first / durable_folder.MARKER).unlink()
    if why == "no link":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    run.push([3])
    second = run.save()
    assert not is_increment(second) and not (second / full_name(0)).exists()
    run.check(second)
    told = "the part is written in full: " in (out := capsys.readouterr().out)
    assert told == (why == "no link"), out


def test_with_copies_elsewhere_each_part_is_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has all files, the linked one as well."""
    plain = servers._config(True, False)
    for to, increment in ((None, True), ("file:///elsewhere", False)):
        config = replace(plain, checkpoint=CheckpointConfig(to=to))
        monkeypatch.setattr(servers, "_config", lambda *_, config=config: config)
        run = Run(tmp_path / str(increment))
        run.save()
        run.push([3])
        assert is_increment(run.save()) == increment


def test_one_checkpoint_that_is_kept_shares_no_file_with_the_newest(tmp_path: Path) -> None:
    """A damaged byte of the shared file would be one of all of them."""
    run = Run(tmp_path, keep_last=2)
    older = run.save()
    run.push(range(80))
    full = run.save()
    assert not is_increment(full)
    for _ in range(3):
        run.push([5])
        newest = run.save()
    assert is_increment(newest) and older.exists()
    with (newest / full_name(0)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert store.newest_whole(run.checkpoints) == older
    run.check(older)


@pytest.mark.parametrize("name", ["an increment", "an increment after one", "a full one after increments"])
def test_wherever_a_run_dies_while_it_saves_there_is_a_whole_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", keep_last=1)
    run.save()
    for ids in {"an increment": [], "an increment after one": [[7]], "a full one after increments": [[7], [8]]}[name]:
        run.push(ids)
        assert is_increment(run.save())
    before = run.step
    run.push([9, 300] if name != "a full one after increments" else range(90))
    with disk.recorded(run.folder) as recorder:
        folder = run.save()
    assert is_increment(folder) == (name != "a full one after increments")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for found in disk.deaths(recorder, tmp_path):
        place, where = found.folder, found.where
        newest = store.newest_whole(place / "checkpoints")
        assert newest is not None, f"nothing is left: {where}"
        check(newest, run.truths)
        assert store.about(newest).step in ((run.step,) if found.at_the_end else (before, run.step)), where
        store.forget_unfinished(place / "checkpoints")
        assert store.newest_whole(place / "checkpoints") == newest, where
