"""Where parameters and rows go: everything once, evenly, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.strategies.pserver.protocol.sharding import BUCKETS, buckets_of, place, server_of_bucket
from trainer.weights.fresh_rows import table_key

parameters = st.lists(
    st.tuples(st.text("abcdef.", min_size=1, max_size=8), st.integers(0, 400)), max_size=30, unique_by=lambda p: p[0]
)
servers = st.integers(1, 9)
methods = st.sampled_from(["round_robin", "hash_name"])


@settings(deadline=None)
@given(parameters, servers, methods, st.one_of(st.none(), st.integers(0, 200)))
def test_every_element_has_one_server(parameters, servers, method, above):
    kept = {name: np.zeros(size, dtype=int) for name, size in parameters}
    pieces = place(parameters, servers, method, above)
    for piece in pieces:
        assert 0 <= piece.server < servers and piece.stop <= len(kept[piece.name])
        kept[piece.name][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in kept.values())
    assert {piece.name for piece in pieces} == set(kept)  # the empty ones too


@settings(deadline=None)
@given(parameters, servers, st.integers(0, 200))
def test_round_robin_balances_slices_and_whole_parameters(parameters, servers, above):
    sizes = dict(parameters)
    pieces = place(parameters, servers, "round_robin", above)
    for name, size in parameters:
        if size > above:
            cut = Counter({p.server: p.stop - p.start for p in pieces if p.name == name})
            assert max(cut[n] for n in range(servers)) - min(cut[n] for n in range(servers)) <= 1
    whole = Counter(p.server for p in pieces if sizes[p.name] <= above)
    assert max(whole[n] for n in range(servers)) - min(whole[n] for n in range(servers)) <= 1


@settings(deadline=None)
@given(parameters, servers, st.integers(0, 200), st.randoms())
def test_hash_name_does_not_depend_on_the_order_or_the_company(parameters, servers, above, random):
    shuffled = random.sample(parameters, len(parameters))
    assert set(place(parameters, servers, "hash_name", above)) == set(place(shuffled, servers, "hash_name", above))
    alone = [piece for parameter in parameters for piece in place([parameter], servers, "hash_name", above)]
    assert alone == place(parameters, servers, "hash_name", above)


def test_hash_name_spreads_many_names():
    pieces = place([(f"layer{n}.weight", 1) for n in range(4000)], 4, "hash_name")
    counts = np.bincount([piece.server for piece in pieces], minlength=4)
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3  # chi-square, 3 degrees of freedom, 0.1 %


@pytest.mark.all
def test_another_process_places_the_same():
    code = (
        "import numpy as np; from trainer.weights.fresh_rows import table_key\n"
        "from trainer.strategies.pserver.protocol.sharding import *\n"
        "print(place([('a.w', 10), ('b.w', 9000), ('c', 3)], 3, 'hash_name'))\n"
        "print(buckets_of(table_key(1, 't'), np.arange(20)).tolist())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # other hashes of strings than here
    run = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
    here = place([("a.w", 10), ("b.w", 9000), ("c", 3)], 3, "hash_name")
    assert run.stdout.splitlines() == [str(here), str(buckets_of(table_key(1, "t"), np.arange(20)).tolist())]


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 64, 1000, 1024])
def test_each_bucket_has_one_server_and_each_server_its_share(servers):
    owner = server_of_bucket(servers)
    counts = np.bincount(owner, minlength=servers)
    assert owner.shape == (BUCKETS,) and len(counts) == servers
    assert counts.max() - counts.min() <= 1


def test_consecutive_ids_fill_the_buckets_evenly_and_otherwise_in_each_table():
    ids = np.arange(100 * BUCKETS)
    buckets = buckets_of(table_key(0, "user"), ids)
    assert buckets.shape == ids.shape and buckets.dtype == np.int64
    counts = np.bincount(buckets, minlength=BUCKETS)
    assert len(counts) == BUCKETS and ((counts - 100) ** 2 / 100).sum() < 1170  # 1023 degrees of freedom, 0.1 %
    assert (buckets_of(table_key(0, "item"), ids) == buckets).mean() < 0.01


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="server"):
        place([("a", 1)], 0)
    with pytest.raises(ValueError, match="split_method"):
        place([("a", 1)], 1, "by_size")
    for servers in (0, BUCKETS + 1):
        with pytest.raises(ValueError, match="servers"):
            server_of_bucket(servers)
