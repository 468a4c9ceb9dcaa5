"""Workers of pserver_geo hold what the servers hold in the end, whatever requests and answers were lost on the way."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.pserver.harness import Cluster, config, impatient, in_threads
from tests.weather import Weather
from trainer.models.embedding_tables import RowEmbedding
from trainer.strategies.pserver.server.shard import Shard
from trainer.strategies.pserver.worker.geo import PserverGeo

ROWS, STEPS, WORKERS = 60, 40, 3


class Net(nn.Module):
    """A layer on rows; its output is bounded, so that no step is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = RowEmbedding(ROWS, 3, "normal", 0.3)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.rows(ids))).mean()


def train(cluster: Cluster, rank: int, seed: int) -> PserverGeo:
    """A worker's steps on batches of its own, and the meeting after them."""
    worker, net = PserverGeo(cluster.run["config"]["strategy"], cluster.seat("worker", rank)), Net().double()
    worker.setup(net, cluster.updaters)
    draw = np.random.default_rng((seed, rank))
    ids = [torch.from_numpy(draw.integers(ROWS, size=4)) for _ in range(STEPS)]
    batches = [SimpleNamespace(inputs=one, on_host=None) for one in ids]
    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        if after is not None:
            worker.expect(after)
        worker.prepare(batch)
        worker.backward(net(batch.inputs))
        worker.step(4)
    worker.synchronize()
    return worker


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_lost_answer_loses_no_row_s_refresh(monkeypatch: pytest.MonkeyPatch, seed: int, overlap: bool) -> None:
    weather = Weather(seed, drop=0.15, double=0.15, delay=0.2)
    run = config("geo", WORKERS, 1 + seed % 2, k_steps=2, overlap=overlap, clip_norm=None)
    with impatient(monkeypatch, weather), Cluster(run) as cluster:
        done = in_threads({str(rank): partial(train, cluster, rank, seed) for rank in range(WORKERS)})
        for rank in range(WORKERS):
            worker: PserverGeo = done[str(rank)]
            replica = worker.replicas[1]
            ids = np.sort(replica.index.ids())
            assert len(ids) > ROWS // 2
            for server, kept in enumerate(cluster.servers):
                assert isinstance(kept.parameters.shard, Shard)
                own = ids[kept.parameters.shard.owns(1, ids)]
                rows = kept.parameters.shard.tables[1].pull(own, create=False)
                torch.testing.assert_close(replica.look_up(own), rows, rtol=0, atol=1e-12)
                torch.testing.assert_close(
                    worker.dense.values(server), kept.parameters.shard.vector, rtol=0, atol=1e-12
                )
        for worker in done.values():
            worker.close()
    assert min(weather.counts.values()) > 20, f"the weather was too good: {weather.counts}"
