"""What Geo workers are told: the rows they hold that others changed, against a full history."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.weights.fresh_rows import RowInit

WORKERS = 3
worker = st.integers(0, WORKERS - 1)
few = st.lists(st.integers(0, 12), max_size=6, unique=True)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), worker, few),
        st.tuples(st.just("hold"), worker, few),
        st.tuples(st.just("refresh"), worker, st.integers(0, 20)),
        st.tuples(st.just("forget"), worker, st.none()),
        st.tuples(st.just("shrink"), worker, st.integers(0, 20)),
    ),
    max_size=40,
)


def table() -> SparseTable:
    return SparseTable("t", 2, torch.float64, 0, RowInit("zeros"), kernel("sgd"), workers=WORKERS)


def array(ids) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


@settings(deadline=None, max_examples=80)
@given(events)
def test_refresh_equals_the_whole_history(events):
    rows, version = table(), 0
    writes: dict[int, list[tuple[int, int]]] = {}  # id -> (version, writer)
    values: dict[int, float] = {}
    touched: dict[int, int] = {}
    held: list[set[int]] = [set() for _ in range(WORKERS)]
    for verb, who, what in events:
        if verb == "add":
            version += 1
            rows.add(array(what), torch.full((len(what), 2), float(version)).double(), who, version, clock=version)
            for id_ in what:
                writes.setdefault(id_, []).append((version, who))
                values[id_] = values.get(id_, 0.0) + version
                touched[id_] = version
                held[who].add(id_)
        elif verb == "hold":
            rows.hold(who, array(what))
            held[who] |= set(what) & set(values)
        elif verb == "forget":
            rows.forget(who)
            held[who].clear()
        elif verb == "shrink":
            gone = [id_ for id_ in values if touched[id_] < what]
            assert rows.shrink(what) == len(gone)
            for id_ in gone:
                del values[id_], touched[id_], writes[id_]
                for some in held:
                    some.discard(id_)
        else:
            ids, found = rows.refresh(who, what)
            news = sorted(i for i in held[who] if any(v > what and w != who for v, w in writes[i]))
            assert ids.tolist() == news
            assert found.tolist() == [[values[i]] * 2 for i in news]


def test_many_rows_keep_their_history_while_the_storage_grows():
    rows = table()
    rows.add(array(range(50)), torch.ones(50, 2).double(), writer=0, version=1)
    rows.add(array(range(5000)), torch.ones(5000, 2).double(), writer=1, version=2)
    assert rows.refresh(0, cursor=1)[0].tolist() == list(range(50))
    assert rows.refresh(1, cursor=0)[0].tolist() == list(range(50))  # they were changed by worker 0 before
    assert rows.refresh(1, cursor=1)[0].tolist() == []


def test_unknown_workers_are_refused():
    for call in (lambda: table().refresh(WORKERS, 0), lambda: table().forget(-1)):
        with pytest.raises(ValueError, match="worker"):
            call()
