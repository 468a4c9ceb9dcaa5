"""The sampler: N workers together see what one process sees, nobody waits for anybody, no sample is lost or doubled."""

from __future__ import annotations

from itertools import chain
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from trainer.data.epoch_order import EpochOrder
from trainer.data.sample_orders import RepeatedAugmentation
from trainer.data.sampler import (
    AllWorkersBatches,
    DistributedBatchSampler,
    EvaluationSampler,
    GlobalBatchSampler,
    TrainingSampler,
)

SHAPES = {
    "num_samples": st.integers(1, 150),
    "batch_size": st.integers(1, 13),
    "world_size": st.integers(1, 9),
    "seed": st.integers(0, 3),
    "epoch": st.integers(0, 3),
    "shuffle": st.booleans(),
}
RULES = {"drop_last": st.booleans(), "pad": st.booleans()}


def workers(world_size: int, epoch: int, **arguments: Any) -> list[DistributedBatchSampler]:
    samplers = [DistributedBatchSampler(rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def counted(sampler: TrainingSampler) -> list[list[int]]:
    """The sampler's batches without placeholders."""
    return [batch[:size] for batch, size in zip(sampler, sampler.sizes(), strict=True)]


def the_epochs_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(num_samples))
    return np.random.default_rng((seed, epoch)).permutation(num_samples).tolist()


@given(**SHAPES, **RULES)
def test_workers_together_see_the_global_batches_of_one_process(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool, pad: bool
) -> None:
    order = the_epochs_order(num_samples, seed, epoch, shuffle)
    while pad and len(order) % world_size:
        order.append(order[len(order) - num_samples])
    together = batch_size * world_size
    chunks = [order[i : i + together] for i in range(0, len(order), together)]
    if drop_last:
        chunks = [chunk for chunk in chunks if len(chunk) == together]
    shape = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    everybody = workers(world_size, epoch, num_samples=num_samples, pad=pad, **shape)
    assert [len(sampler) for sampler in everybody] == [len(chunks)] * world_size
    batches = [counted(sampler) for sampler in everybody]
    for number, chunk in enumerate(chunks):
        shares = [batches[rank][number] for rank in range(world_size)]
        assert sorted(chain.from_iterable(shares)) == sorted(chunk)
        assert max(map(len, shares)) - min(map(len, shares)) <= (0 if pad or drop_last else 1)
        assert max(map(len, shares)) <= batch_size


@given(**SHAPES, **RULES)
def test_sizes_are_the_real_lengths_and_a_placeholder_is_one_sample_of_the_batch(
    world_size: int, epoch: int, **arguments: Any
) -> None:
    everybody = workers(world_size, epoch, **arguments)
    batches = [list(sampler) for sampler in everybody]
    for rank, sampler in enumerate(everybody):
        assert len(batches[rank]) == len(sampler.sizes()) == len(sampler)
        for number, (batch, size) in enumerate(zip(batches[rank], sampler.sizes(), strict=True)):
            assert len(batch) == max(1, size)
            if not size:
                assert not arguments["pad"] and not arguments["drop_last"]
                assert any(batch[0] in b[number][:1] for r, b in enumerate(batches) if everybody[r].sizes()[number])


@given(
    num_samples=st.integers(30, 200), epochs=st.tuples(st.integers(0, 50), st.integers(0, 50)), seed=st.integers(0, 9)
)
def test_every_epoch_has_an_order_of_its_own_and_always_the_same(
    num_samples: int, epochs: tuple[int, int], seed: int
) -> None:
    one, other = (DistributedBatchSampler(num_samples, 4, seed=seed) for _ in range(2))
    orders = []
    for epoch in epochs:
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(one) == list(other)
        orders.append(list(one))
    assert (orders[0] == orders[1]) == (epochs[0] == epochs[1])
    assert list(DistributedBatchSampler(num_samples, 4, seed=seed + 1)) != list(
        DistributedBatchSampler(num_samples, 4, seed=seed)
    )


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of 2 workers"):
        DistributedBatchSampler(10, 2, rank, 2)


@given(num_samples=st.integers(0, 150), batch_size=st.integers(1, 13), world_size=st.integers(1, 9))
def test_evaluation_sees_every_sample_exactly_once(num_samples: int, batch_size: int, world_size: int) -> None:
    everybody = [EvaluationSampler(num_samples, batch_size, rank, world_size) for rank in range(world_size)]
    assert sorted(index for sampler in everybody for batch in sampler for index in batch) == list(range(num_samples))
    for sampler in everybody:
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(0 < len(batch) <= batch_size for batch in batches)
        assert all(len(batch) == batch_size for batch in batches[:-1])


GLOBAL = {
    "num_samples": st.integers(1, 150),
    "global_batch_size": st.integers(1, 40),
    "merge": st.integers(1, 5),
    "world_size": st.integers(1, 8),
    "drop_last": st.booleans(),
    "epoch": st.integers(0, 3),
}


def sharing(world_size: int, epoch: int, **arguments: Any) -> list[GlobalBatchSampler]:
    samplers = [GlobalBatchSampler(rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


@given(**GLOBAL)
def test_updates_follow_from_the_data_and_the_global_batch_alone(
    num_samples: int, global_batch_size: int, merge: int, world_size: int, drop_last: bool, epoch: int
) -> None:
    assume(global_batch_size >= merge * world_size)
    order = the_epochs_order(num_samples, 0, epoch, True)
    truth = [order[i : i + global_batch_size] for i in range(0, num_samples, global_batch_size)]
    if drop_last and len(truth[-1]) < global_batch_size:
        truth.pop()
    shape = {"global_batch_size": global_batch_size, "merge": merge, "drop_last": drop_last}
    everybody = sharing(world_size, epoch, num_samples=num_samples, **shape)
    assert {len(sampler) for sampler in everybody} == {len(everybody[0])}
    assert ceil(len(everybody[0]) / merge) == len(truth), "updates of the epoch"
    batches = [counted(sampler) for sampler in everybody]
    most = ceil(ceil(global_batch_size / merge) / world_size)
    for number, samples in enumerate(truth):
        shares = [batches[rank][number * merge : (number + 1) * merge] for rank in range(world_size)]
        assert sorted(chain.from_iterable(chain.from_iterable(shares))) == sorted(samples), "each sample once"
        each = [sum(map(len, share)) for share in shares]
        assert max(each) - min(each) <= 1
        assert max(map(len, chain.from_iterable(shares))) <= most, "data.batch_size of the plan"
        assert len(shares[0]) == (
            merge if len(samples) == global_batch_size else ceil(len(samples) * merge / global_batch_size)
        )
    for sampler in everybody:
        assert [len(batch) for batch in sampler] == [max(1, size) for size in sampler.sizes()], "placeholders"
    even = all(len(samples) % world_size == 0 for samples in truth)
    assert everybody[0].even(merge) == even
    for limit in (1, merge + 1):
        got = [sum(s.sizes()[:limit][i : i + merge]) for s in everybody for i in range(0, limit, merge)]
        by_worker = [got[i :: ceil(limit / merge)] for i in range(ceil(limit / merge))]
        assert everybody[0].even(merge, limit) == all(len(set(sizes)) == 1 for sizes in by_worker)


@given(**{**GLOBAL, "global_batch_size": st.integers(1, 6)})
def test_global_batches_that_divide_are_those_of_batches_per_worker(
    num_samples: int, global_batch_size: int, merge: int, world_size: int, drop_last: bool, epoch: int
) -> None:
    """The same samples in the same places: whoever set the one may set the other."""
    size = global_batch_size * merge * world_size
    whole = num_samples // size * size
    assume(whole)
    everybody = sharing(world_size, epoch, num_samples=whole, global_batch_size=size, merge=merge, drop_last=drop_last)
    others = workers(world_size, epoch, num_samples=whole, batch_size=global_batch_size, drop_last=drop_last)
    assert [list(sampler) for sampler in everybody] == [list(sampler) for sampler in others]


@given(**GLOBAL)
def test_who_reads_for_everybody_reads_what_each_would_have_read(
    num_samples: int, global_batch_size: int, merge: int, world_size: int, drop_last: bool, epoch: int
) -> None:
    assume(global_batch_size >= merge * world_size)
    order = EpochOrder(num_samples, 0, RepeatedAugmentation(3))
    shape = {"global_batch_size": global_batch_size, "merge": merge, "drop_last": drop_last}
    everybody = sharing(world_size, epoch, num_samples=num_samples, order=order, **shape)
    reads = [batch.tolist() for batch in AllWorkersBatches(everybody[0]).arrays()]
    assert [reads[rank::world_size] for rank in range(world_size)] == [list(sampler) for sampler in everybody]
    assert len(reads) == len(AllWorkersBatches(everybody[0]))


def test_a_global_batch_without_a_sample_for_each_is_refused() -> None:
    with pytest.raises(ValueError, match="5 samples cannot be shared out over 6 batches"):
        GlobalBatchSampler(10, 5, merge=2, world_size=3)


def paddles_order(num_samples: int, world_size: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The data go on with sample 0, 1, ..., and then are shuffled."""
    padded = [place % num_samples for place in range(ceil(num_samples / world_size) * world_size)]
    return [padded[place] for place in the_epochs_order(len(padded), seed, epoch, shuffle)]


def paddles_batches(order: list[int], batch_size: int, world_size: int, rank: int, drop_last: bool) -> list[list[int]]:
    """Blocks are dealt out to the workers in turn; of what is left at the end each has a block, too."""
    together = batch_size * world_size
    end = len(order) - len(order) % together
    batches = [order[at + rank * batch_size :][:batch_size] for at in range(0, end, together)]
    rest = (len(order) - end) // world_size
    return [*batches, *([] if drop_last or not rest else [order[end + rank * rest :][:rest]])]


@given(**SHAPES, drop_last=st.booleans())
def test_contiguous_padding_is_that_of_paddles_sampler(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    order = paddles_order(num_samples, world_size, seed, epoch, shuffle)
    shape = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    everybody = workers(world_size, epoch, num_samples=num_samples, padding="contiguous", **shape)
    for rank, sampler in enumerate(everybody):
        assert list(sampler) == paddles_batches(order, batch_size, world_size, rank, drop_last)
        assert sampler.sizes() == [len(batch) for batch in sampler]
        each = ceil(num_samples / world_size)
        assert len(sampler) == (each // batch_size if drop_last else ceil(each / batch_size)), "its length"


def test_both_paddings_of_ten_samples_on_three_workers() -> None:
    """10 samples go on to 12: four for each worker, in a batch of three and one of one."""

    def of(padding: str) -> list[list[list[int]]]:
        return [list(DistributedBatchSampler(10, 3, rank, 3, shuffle=False, padding=padding)) for rank in range(3)]

    assert of("contiguous") == [[[0, 1, 2], [9]], [[3, 4, 5], [0]], [[6, 7, 8], [1]]]
    assert of("strided") == [[[0, 3, 6], [9]], [[1, 4, 7], [0]], [[2, 5, 8], [1]]]


@given(**SHAPES, drop_last=st.booleans())
def test_strided_padding_is_that_of_torchs_sampler(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    order = the_epochs_order(num_samples, seed, epoch, shuffle)
    shape = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    everybody = workers(world_size, epoch, num_samples=num_samples, **shape)
    for rank, sampler in enumerate(everybody):
        theirs = DistributedSampler(range(num_samples), world_size, rank, shuffle=False)  # type: ignore[arg-type]
        mine = [order[place] for place in theirs]
        batches = [mine[at : at + batch_size] for at in range(0, len(mine), batch_size)]
        assert list(sampler) == [b for b in batches if len(b) == batch_size or not drop_last]


@given(**SHAPES, drop_last=st.booleans())
def test_contiguous_blocks_without_padding_count_every_sample_once(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    shape = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    everybody = workers(world_size, epoch, num_samples=num_samples, pad=False, padding="contiguous", **shape)
    order = the_epochs_order(num_samples, seed, epoch, shuffle)
    together = batch_size * world_size
    used = order[: num_samples - num_samples % together] if drop_last else order
    seen = [counted(sampler) for sampler in everybody]
    assert [index for batches in zip(*seen, strict=True) for batch in batches for index in batch] == used
    assert all(max(sizes) - min(sizes) <= 1 for sizes in zip(*(s.sizes() for s in everybody), strict=True))
    reads = [batch.tolist() for batch in AllWorkersBatches(everybody[0]).arrays()]
    assert [reads[rank::world_size] for rank in range(world_size)] == [list(sampler) for sampler in everybody]


@pytest.mark.parametrize(
    "wrong", [{"padding": "block"}, {"padding": "contiguous", "order": EpochOrder(10, 0, RepeatedAugmentation(3))}]
)
def test_a_padding_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="padding is strided or contiguous"):
        DistributedBatchSampler(10, 2, **wrong)
