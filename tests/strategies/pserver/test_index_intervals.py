"""Intervals are the set of integers that they stand for."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.strategies.pserver.protocol.index_intervals import Intervals

pairs = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(added=st.lists(pairs, max_size=12), asked=pairs)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_intervals_are_a_set(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    intervals, truth = Intervals(added), {n for start, stop in added for n in range(start, stop)}
    assert {n for start, stop in intervals for n in range(start, stop)} == truth
    parts = list(intervals)
    assert all(start < stop for start, stop in parts)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(parts)), "two that touch are one"
    wanted = set(range(*asked))
    assert intervals.covers(*asked) == (wanted <= truth)
    assert intervals.touches(*asked) == bool(wanted & truth)
    assert intervals.first_gap(asked[0]) == next(n for n in range(asked[0], 50) if n not in truth)
