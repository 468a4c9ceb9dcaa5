"""What the servers do with a late gradient: delay compensation, and a learning rate that falls with staleness."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.strategies.pserver.harness import DIM, Bare, Cluster, config
from tests.strategies.pserver.test_versions import STRENGTH, placed, step
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol.messages import Kind, Record

IDS = np.array([3, 8], dtype=np.int64)
FIRST, LATE = np.array([1.0, 2.0, -1.0, 0.5]), np.array([0.5, -1.0, 2.0, 1.0])


def batch() -> SimpleNamespace:
    return SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True)


def push(worker: Bare, dense: np.ndarray, value: float, clock: int) -> None:
    """One push of gradients that were computed at version 0, waited for."""
    worker.client.wait(worker.client.push(worker.gradient(dense, IDS, value, 1.0, clock)))


def after(servers: int, **strategy: float) -> tuple[np.ndarray, dict[int, float], dict[int, float]]:
    """Worker 0 pulls, worker 1 moves everything, worker 0 pushes late: the dense vector, and rows before and after."""
    with Cluster(config("async", 2, servers, launch_barrier=False, **strategy)) as cluster:
        one, two = Bare(cluster, 0), None
        one.begin()
        two = Bare(cluster, 1)
        _, fresh = one.look(IDS)
        push(two, FIRST, 0.25, 1)
        push(one, LATE, 2.0, 1)
        vectors, rows = one.look(IDS)
        assert (vectors == vectors[0]).all() and DIM == 3
        one.die()
        two.die()
    return vectors[0], fresh, rows


@pytest.mark.parametrize("servers", [1, 2])
def test_delay_compensation_is_that_of_dc_asgd(servers: int) -> None:
    strength = 0.3
    vector, fresh, rows = after(servers, delay_compensation=strength)
    moved = -FIRST  # sgd with a learning rate of 1, from zeros
    np.testing.assert_allclose(vector, moved - (LATE + strength * LATE**2 * moved), rtol=0, atol=1e-12)
    for id_, value in rows.items():
        assert value == pytest.approx(fresh[id_] - 0.25 - (2.0 + strength * 4.0 * -0.25), abs=1e-12)


@pytest.mark.parametrize(("pulls", "compensated"), [(8, True), (9, False)])
def test_delay_compensation_remembers_the_last_eight_pulls_of_a_worker(pulls: int, compensated: bool) -> None:
    with Cluster(config("async", 2, 1, launch_barrier=False, delay_compensation=STRENGTH)) as cluster:
        one, two = Bare(cluster, 0), Bare(cluster, 1)
        one.begin()
        for clock in range(1, pulls + 1):  # the first one is of version 0, of which the late gradient is
            one.look(IDS)
            push(two, FIRST, 0.25, clock)
        push(one, LATE, 2.0, 1)
        moved = -pulls * FIRST
        expected = moved - (LATE + compensated * STRENGTH * LATE**2 * moved)
        np.testing.assert_allclose(one.look(IDS)[0][0], expected, rtol=0, atol=1e-12)
        one.die()
        two.die()


def test_first_batch_after_a_meeting_is_not_compensated_in_async() -> None:
    run = config("async", 1, 1, launch_barrier=False, independent_recv_thread=False, delay_compensation=STRENGTH)
    with Cluster(run) as cluster:
        worker, [server] = placed(cluster), cluster.servers
        step(worker, 1.0)
        for strength in (0.0, STRENGTH):
            if not strength:
                worker.synchronize()
            worker.prepare(batch())
            shard = server.parameters.shard
            assert shard is not None
            shard.apply(torch.full_like(shard.vector, 0.5), {}, 0)
            before = shard.vector.clone()
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, 2.0)
            worker.step(1)
            worker.finish_pushes()
            expected = before - (2.0 + strength * 4.0 * -0.5)
            torch.testing.assert_close(shard.vector, expected, rtol=0, atol=1e-12)
        worker.close()


def test_learning_rate_falls_with_staleness() -> None:
    vector, fresh, rows = after(1, staleness_power=1.0)
    np.testing.assert_allclose(vector, -FIRST - LATE / 2, rtol=0, atol=1e-12)
    assert rows[3] == pytest.approx(fresh[3] - 0.25 - 2.0 / 2, abs=1e-12)


def test_without_either_a_late_gradient_counts_as_any_other() -> None:
    vector, _, _ = after(1)
    np.testing.assert_allclose(vector, -FIRST - LATE, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "story"),
    [
        ("async", [(0, 1), (1, 1), (1, 1), (0, 3), (1, 2), (0, 4), (1, 4), (0, 1)]),
        ("ssp", [(0, 1), (1, 1), (1, 1), (1, 1), (0, 1), (1, 1), (0, 1)]),
    ],
)
def test_schedule_of_several_workers_goes_on_by_every_gradient_of_theirs(
    mode: str, story: list[tuple[int, int]]
) -> None:
    run = config(mode, 2, 2, launch_barrier=False, **({"max_merge_var_num": 4} if mode == "async" else {}))
    run["config"]["scheduler"]["warmup_steps"] = 6
    with Cluster(run) as cluster:
        workers = [Bare(cluster, 0)]
        workers[0].begin()
        workers.append(Bare(cluster, 1))
        expected, updates = np.zeros(4), 0
        for clock, (rank, merged) in enumerate(story, 1):
            messages = workers[rank].gradient(FIRST, IDS, 1.0, 1.0, clock)
            for message in messages:
                numbers = message.need(Kind.NUMBERS)
                message.records[0] = Record(Kind.NUMBERS, np.append(numbers, float(merged)))
            workers[rank].client.wait(workers[rank].client.push(messages))
            expected -= FIRST * min(1.0, (updates // 2 + 1) / 6)
            updates += merged
        vectors, _ = workers[0].look(IDS)
        for vector, server in zip(vectors, cluster.servers, strict=True):
            np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-12)
            assert server.statistics()["step"] == updates // 2
        for worker in workers:
            worker.die()


@pytest.mark.parametrize("merged", [0.0, 3.0, 1e12])
def test_push_of_more_gradients_than_may_be_merged_is_refused(merged: float) -> None:
    with Cluster(config("async", 1, 1, max_merge_var_num=2)) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        [message] = worker.gradient(FIRST, IDS, 1.0, 1.0, 1)
        message.records[0] = Record(Kind.NUMBERS, np.array([0.0, 1.0, 1.0, merged]))
        with pytest.raises(RunFailed, match="gradients"):
            worker.client.wait(worker.client.push([message]))
        assert cluster.servers[0].statistics()["version"] == 0
        worker.die()
