"""A full part and an increment are read as the full part that would have been written then: bit by bit, whatever
happened between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies.pserver.states import whole
from trainer.checkpoint import streamed
from trainer.strategies.pserver.server.admission import Count
from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.weights.fresh_rows import RowInit
from trainer.weights.merged_rows import MergedRows
from trainer.weights.server_files import SINCE, ServerFile, full_name, part_name

DIM, IDS = 3, 90
SOME = st.lists(st.integers(0, IDS - 1), max_size=25, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "pull", "look", "assign"]), SOME),
        st.tuples(st.sampled_from(["shrink", "count_from"]), st.integers(0, 12)),
        st.just(("increment", 0)),
    ),
    max_size=40,
)


class Played:
    """A table to which things happen."""

    def __init__(self, rows: int | None, optimizer: str, admission: Count | None, workers: int) -> None:
        self.table = SparseTable(
            "t",
            DIM,
            torch.float64,
            0,
            RowInit(),
            kernel(optimizer),
            admission=admission,
            num_rows=rows,
            workers=workers,
        )
        self.clock, self.draw = 0, np.random.default_rng(0)

    def does(self, what: str, of: list[int] | int) -> None:
        self.clock += 1
        table, clock = self.table, self.clock
        if not isinstance(of, list):
            table.shrink(clock - of) if what == "shrink" else table.count_from(of)
            return
        ids = np.array(sorted(of), dtype=np.int64)
        values = torch.from_numpy(self.draw.random((len(ids), DIM)))
        if what == "push" and table._changes.workers:
            table.add(ids, values, 0, clock, clock)
        elif what == "push":
            table.push(ids, values, 0.1, clock, clock)
        elif what == "assign":
            table.assign(ids, values, clock)
        else:
            table.pull(ids, create=what == "pull", clock=clock - 3)


def written(folder: Path, table: SparseTable, version: int, since: int | None) -> ServerFile:
    """A part: a full one of that version, or an increment since then."""
    told = {"meta": f'{{"version": {version}, "life": 7' + ("" if since is None else f', "{SINCE}": {since}') + "}"}
    tensors = {f"table|t|{name}": one for name, one in table.state(increment=since is not None).items()}
    tensors["dense|fc|0"] = streamed.of(np.full(4, float(version)))
    name = full_name(0) if since is None else part_name(0)
    streamed.write(folder / name, tensors, told)
    return ServerFile(0, folder / name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    STEPS,
    STEPS,
    st.sampled_from([IDS, None]),
    st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"]),
    st.sampled_from([None, Count(2)]),
    st.sampled_from([0, 2]),
)
def test_full_part_and_increment_are_what_a_full_part_is(
    tmp_path_factory: pytest.TempPathFactory,
    before: list,
    after: list,
    rows: int | None,
    optimizer: str,
    admission: Count | None,
    workers: int,
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    played = Played(rows, optimizer, admission, workers)
    for what, of in before:
        played.does(what, of) if what != "increment" else None
    written(folder, played.table, 1, None)
    played.table.count_changes()
    for what, of in [*after, ("increment", 0)]:
        if what != "increment":
            played.does(what, of)
            continue
        if not played.table.since.counts:  # so many rows went that a full part is better
            return
        found, truth = written(folder, played.table, 2, 1), whole(played.table.state())
        assert {name.removeprefix("table|t|") for name in found if name.startswith("table")} == truth.keys()
        for name, tensor in truth.items():
            mine = found[f"table|t|{name}"]
            assert mine.dtype == tensor.dtype and torch.equal(mine, tensor), name
        assert found["dense|fc|0"].tolist() == [2.0] * 4
        again = Played(rows, optimizer, admission, workers).table
        again.load({name: found[f"table|t|{name}"] for name in truth}, lambda ids: np.ones(len(ids), dtype=bool))
        loaded = whole(again.state())
        assert all(torch.equal(loaded[name], truth[name]) for name in truth)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sets(st.integers(0, 30)), st.dictionaries(st.integers(0, 30), st.integers(0, 9)), st.sets(st.integers(0, 30)))
def test_rows_are_merged_as_by_a_dictionary(full: set[int], changed: dict[int, int], removed: set[int]) -> None:
    truth = {i: (-i, -i) for i in full - removed} | {i: (value, i) for i, value in changed.items()}
    old, new = np.array(sorted(full), dtype=np.int64), np.array(sorted(changed), dtype=np.int64)
    merged = MergedRows.of(old, new, np.array([*removed, *removed], dtype=np.int64)[::-1])
    assert merged.ids.tolist() == sorted(truth)
    values = torch.tensor([(changed[i], i) for i in sorted(changed)], dtype=torch.int64).reshape(-1, 2)
    rows = merged.rows(torch.from_numpy(np.stack([-old, -old], axis=1)), values)
    assert [tuple(row) for row in rows.tolist()] == [truth[i] for i in sorted(truth)]


def test_an_increment_has_what_has_changed_alone(tmp_path: Path) -> None:
    played = Played(IDS, "adagrad", None, 0)
    played.does("push", list(range(IDS)))
    full = written(tmp_path, played.table, 1, None)
    played.table.count_changes()
    played.does("push", [4, 7])
    part = written(tmp_path, played.table, 2, 1)
    assert part._file.get_tensor("table|t|ids").tolist() == [4, 7] and full["table|t|ids"].tolist() == list(range(IDS))
    assert part["table|t|rows"].shape == (IDS, 2 * DIM)


def test_an_increment_of_another_full_part_is_not_read(tmp_path: Path) -> None:
    played = Played(IDS, "sgd", None, 0)
    played.does("push", [1, 2])
    written(tmp_path, played.table, 1, None)
    played.table.count_changes()
    part = written(tmp_path, played.table, 5, 3)
    with pytest.raises(ValueError, match=r"full-0.* is not what server-0.* is an increment of"):
        part["table|t|rows"]


def test_changes_are_not_counted_for_ever_where_nobody_saves() -> None:
    played = Played(None, "sgd", None, 0)
    played.does("push", list(range(20)))
    played.table.count_changes()
    for _ in range(20):
        played.does("push", list(range(20)))
        played.does("shrink", -1)
    assert not played.table.since.counts and played.table.since.nbytes() == 0
