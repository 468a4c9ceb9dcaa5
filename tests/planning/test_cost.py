"""Costs of strategies against simulations of messages and of passes, written here a second time."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.planning import cost
from trainer.planning.cost import Cores, Cost, Link, Machine, Ring, Work

SECONDS = st.floats(1e-4, 10.0)
SIZES = st.lists(st.tuples(st.floats(1.0, 1e8), SECONDS), min_size=1, max_size=12)
WORK = Work(forward=1.0, backward=2.0, update=0.5, rest=0.1)


def rounds(workers: int, link: Link, size: float, number: int) -> float:
    """The time of so many rounds in which each worker sends a piece to the next one and waits for the one before."""
    clocks = [0.0] * workers
    for _ in range(number):
        arrived = [clock + link.alpha + link.beta * size / workers for clock in clocks]
        clocks = [max(arrived[n], arrived[n - 1]) for n in range(workers)]
    return max(clocks)


@given(st.integers(2, 40), st.floats(0, 0.1), st.floats(0, 1e-6), st.floats(1, 1e8))
def test_a_ring_takes_as_long_as_its_messages(workers: int, alpha: float, beta: float, size: float) -> None:
    link = Link(alpha, beta)
    ring = Ring(workers, link)
    assert math.isclose(ring.all_reduce(size), rounds(workers, link, size, 2 * (workers - 1)), abs_tol=1e-12)
    assert math.isclose(ring.half(size), rounds(workers, link, size, workers - 1), abs_tol=1e-12)


def asked_for(latency: float, beta: float, piece: float, number: int) -> float:
    """The time of so many pieces, each asked for over a link of that latency when the last but one has arrived."""
    arrived: list[float] = []
    free = 0.0
    for n in range(number):
        asked = arrived[n - 2] if n >= 2 else 0.0
        free = max(asked + latency, free) + beta * piece
        arrived.append(free + latency)
    return arrived[-1]


@given(st.integers(2, 9), st.floats(0, 0.1), st.floats(1e-11, 1e-6), st.floats(1, 3e8))
def test_an_all_reduce_of_gloo_takes_as_long_as_its_pieces(
    workers: int, latency: float, beta: float, size: float
) -> None:
    ring = Ring(workers, Link.declared(8e-9 / beta, latency * 1e3, gloo=True))
    each = max(2, math.ceil(size / workers / 2**20))
    number = (workers - 1) * each
    half = asked_for(latency, beta, size / workers / each, number)
    found = ring.all_reduce(size) / 2
    assert found <= half * (1 + 1e-9) + 1e-9 and half - found <= latency + beta * 2**20
    if number % 2 == 0:
        assert math.isclose(found, half, rel_tol=1e-6, abs_tol=1e-9)


def test_streams_share_the_bandwidth_and_not_the_latency() -> None:
    far, buckets = Ring(2, Link.declared(1, 50, gloo=True)), [25 * 2.0**20] * 4
    alone, beside = (cost.averaged_gradients(WORK, far, buckets, streams) for streams in (1, 4))
    assert alone.exposed > 3 * beside.exposed and alone.sent == beside.sent
    near = Ring(2, Link.declared(1, 0, gloo=True))
    alone, beside = (cost.averaged_gradients(WORK, near, buckets, streams) for streams in (1, 4))
    assert alone.exposed == pytest.approx(beside.exposed)


@given(SIZES, SECONDS)
def test_buckets_overlap_the_backward_as_in_a_simulation_of_events(
    buckets: list[tuple[float, float]], backward: float
) -> None:
    whole, produced, queue, waiting, clock, busy = sum(size for size, _ in buckets), 0.0, [], [], 0.0, False
    for number, (size, _) in enumerate(buckets):
        produced += size
        heapq.heappush(queue, (backward * produced / whole, 1, number))
    while queue:
        clock, is_ready, number = heapq.heappop(queue)
        if is_ready:
            waiting.append(number)
        else:
            busy = False
        if waiting and not busy:
            sent, busy = waiting.pop(0), True
            heapq.heappush(queue, (clock + buckets[sent][1], 0, sent))
    found = cost.overlapped([seconds for _, seconds in buckets], [size for size, _ in buckets], backward)
    assert math.isclose(found, max(0.0, clock - backward), rel_tol=1e-6, abs_tol=1e-9)


def test_one_bucket_hides_nothing_and_many_small_ones_hide_all_but_the_last() -> None:
    ring = Ring(2, Link(0.0, 0.001))  # an all-reduce of 100 bytes takes 0.1 s
    assert cost.averaged_gradients(WORK, ring, [100]) == Cost(WORK.total, pytest.approx(0.1), 100.0)
    many = cost.averaged_gradients(WORK, ring, [1.0] * 100)
    assert many.exposed == pytest.approx(0.001) and many.sent == 100.0


def test_blocks_are_gathered_while_the_one_before_computes() -> None:
    ring = Ring(2, Link(0.0, 0.02))  # a block of 100 bytes takes a second to gather or to scatter
    work = Work(forward=4.0, backward=4.0, update=1.0)
    # forward: the first block is waited for; backward: the last block, and the gradients of the first
    found = cost.sharded(work, ring, [100, 100], [100, 100], gathers=2)
    assert found == Cost(8.5, pytest.approx(1.0 + 2.0), 300.0)  # a worker sends half of 6 blocks, and updates half
    assert cost.sharded(work, ring, [100, 100], [100, 100], gathers=1).exposed == pytest.approx(1.0 + 1.0)
    # computation of nothing: the link is all that counts, each block thrice
    idle = cost.sharded(Work(1e-9, 1e-9, 0.0), ring, [100, 100], [100, 100], gathers=2)
    assert idle.exposed == pytest.approx(6.0)


def test_bytes_that_a_worker_sends_are_those_of_the_papers() -> None:
    ring, size = Ring(4, Link(1e-4, 1e-9)), 1e6
    assert cost.averaged_gradients(WORK, ring, [size]).sent == pytest.approx(1.5e6)  # 2 (n-1)/n
    assert cost.sharded_optimizer(WORK, ring, [size], size).sent == pytest.approx(2.25e6)
    assert cost.averaged_parameters(WORK, ring, size, 4).sent == pytest.approx(1.5e6 / 4)
    assert cost.after_backward(WORK, ring, size, 1, to_all=True).sent == pytest.approx(3e6)
    once, thrice = (cost.after_backward(WORK, ring, size, times).exposed for times in (1, 3))
    assert thrice - once == pytest.approx(2 * 2 * 3 * 1e-4), "messages one after another, of the same bytes"
    assert cost.served(WORK, ring.link, 4, 2, size).exposed == pytest.approx(2 * (1e-4 + 2e-3))  # two workers a server
    assert cost.served_now_and_then(WORK, ring.link, 4, 2, size, 100).exposed == 0.0


def test_a_server_that_is_slower_than_its_workers_is_the_limit() -> None:
    slow = Work(0.01, 0.01, update=0.1)  # a server needs 0.1 s for each push, and 8 workers push to it
    assert cost.served_apart(slow, Link(0.0, 0.0), 8, 1, 1.0).step == pytest.approx(0.8)
    assert cost.served_apart(slow, Link(0.0, 0.0), 8, 8, 1.0).step == pytest.approx(0.1)


@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-7))
def test_a_link_is_found_again_from_its_all_reduces(alpha: float, beta: float) -> None:
    ring = Ring(2, Link(alpha, beta))
    found = cost.fitted([(size, ring.all_reduce(size)) for size in (1024, 65_536, 1 << 20, 1 << 24, 1 << 30)])
    assert math.isclose(found.alpha, alpha, rel_tol=1e-3) and math.isclose(found.beta, beta, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("number", "threads", "workers", "slower"),
    [(2, 0, 4, 2), (2, 1, 4, 2), (8, 1, 4, 1), (8, 1, 16, 2), (64, 0, 4, 2), (0, 0, 8, 1), (2, 0, 1, 1)],
)
def test_workers_of_a_host_share_its_cores(number: int, threads: int, workers: int, slower: float) -> None:
    """Of 64 cores each of two has 32, and each of four 16. GPUs are not shared."""
    beside = WORK.times(1.5)
    found = Cores(number, threads, WORK, beside).work(workers).total
    assert found == pytest.approx(WORK.total if workers == 1 else beside.total * slower)


def test_workers_of_several_hosts_share_only_their_own_cores_and_go_at_the_slower_link() -> None:
    cores = Cores(2, 1, WORK, WORK.times(2))
    machine = Machine(cores, Link(1e-4, 1e-9), per_host=2, between=Link.declared(gbit=0.1, latency_ms=5), gamma=1e-9)
    assert machine.group(2).link == Link(1e-4, 1e-9)
    eight = machine.group(8)
    assert eight.work == WORK.times(2) and eight.link == Link(5e-3, 8e-8)
    crowded = Machine(cores, Link(1e-4, 1e-9), per_host=8, gamma=1e-9).group(8)
    assert crowded.work == WORK.times(2 * 4) and crowded.gamma == pytest.approx(4e-9)


def test_a_fixed_global_batch_scales_the_passes_on_a_line_and_not_the_update() -> None:
    machine = Machine(Cores(0, 0, WORK, WORK), Link(0, 0), 8, passes=((8.0, 2.0), (16.0, 3.0)), batch=16.0)
    half = machine.group(4, batch=8.0).work
    assert half.forward == pytest.approx(2 / 3) and half.backward == pytest.approx(4 / 3)
    assert (half.update, half.rest) == (WORK.update, WORK.rest)
    assert cost.line((8, 2), (16, 3), 4) == pytest.approx(1.5) and cost.line((8, 2), (16, 3), 0) == pytest.approx(1.0)
