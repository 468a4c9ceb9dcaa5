"""Servers take their pushes in an order of their own, so each has its version: a worker tells each the one it has of
it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.strategies.pserver.harness import Cluster, config
from trainer.strategies.pserver.worker.async_and_ssp import PserverAsync
from trainer.strategies.pserver.worker.export import save_persistables

STRENGTH = 0.3


def placed(cluster: Cluster) -> PserverAsync:
    """The worker of a cluster with one, the model placed."""
    run = cluster.run
    node = {k: v for k, v in run["config"]["strategy"].items() if k != "_target_"}
    worker = PserverAsync(node, cluster.seat("worker", 0))
    worker.setup(net(), cluster.updaters)
    return worker


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()


def step(worker: PserverAsync, gradient: float) -> None:
    """One update with equal gradients everywhere, done at the servers."""
    worker.prepare(SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True))
    for p in worker.model.parameters():
        p.grad = torch.full_like(p, gradient)
    worker.step(1)
    worker.finish_pushes()


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_each_server_compensates_and_counts_staleness_by_its_own_version(servers: int) -> None:
    run = config(
        "async",
        1,
        servers,
        launch_barrier=False,
        independent_recv_thread=False,
        slice_above=4,
        delay_compensation=STRENGTH,
    )
    with Cluster(run) as cluster:
        worker = placed(cluster)
        shards = [server.parameters.shard for server in cluster.servers]
        step(worker, 1.0)
        for ahead, shard in enumerate(shards):  # others' pushes that have come here and not there yet
            for _ in range(ahead):
                shard.apply(torch.zeros_like(shard.vector), {}, 0)
        worker.prepare(SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True))
        for ahead, shard in enumerate(shards):
            for _ in range(ahead + 1):
                shard.apply(torch.full_like(shard.vector, 0.5), {}, 0)
        before = [shard.vector.clone() for shard in shards]
        for p in worker.model.parameters():
            p.grad = torch.full_like(p, 2.0)
        worker.step(1)
        worker.finish_pushes()
        for ahead, (server, shard) in enumerate(zip(cluster.servers, shards, strict=True)):
            moved = -0.5 * (ahead + 1)  # sgd with a learning rate of 1
            expected = before[ahead] - (2.0 + STRENGTH * 4.0 * moved)
            torch.testing.assert_close(shard.vector, expected, rtol=0, atol=1e-12)
            assert server.parameters.rule.staleness == {0: 1, ahead + 1: 1}
        worker.close()


def test_plateau_of_a_run_that_starts_from_persistables_keeps_its_factor_and_forgets_the_validations(
    tmp_path: Path,
) -> None:
    run = config("async", 1, 2, launch_barrier=False, independent_recv_thread=False, slice_above=4)
    run["config"]["scheduler"] = {"_target_": "trainer.optim.schedules.Plateau", "patience": 1, "gamma": 0.25}
    run["plan"]["paths"]["run_dir"] = str(tmp_path)
    with Cluster(run) as cluster:
        worker = placed(cluster)
        step(worker, 1.0)
        for loss in (
            1.0,
            2.0,
            2.0,
            2.0,
        ):  # after the third the rate has fallen; the fourth is one of two that would lower it again
            worker.observe(1, {"val/loss": loss})
        save_persistables(worker.client, tmp_path / "checkpoints" / "persistables")
        worker.close()
    run["config"]["strategy"]["load_from"] = str(tmp_path / "checkpoints" / "persistables")
    with Cluster(run) as cluster:
        worker = placed(cluster)
        plateau = worker.updater.plateau
        assert plateau is not None and (plateau.scale, plateau.bad, worker.lr) == (0.25, 0, 0.25)
        before = next(worker.model.parameters()).clone()
        step(worker, 1.0)
        worker.take_all()
        torch.testing.assert_close(next(worker.model.parameters()), before - 0.25)
        worker.close()
