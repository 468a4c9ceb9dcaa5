"""Rows that nobody has touched for long are dropped, by the age that the run counts: how it goes on at the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.pserver.harness import Bare, Cluster, config
from tests.strategies.pserver.states import whole
from trainer.config.run_config import RunConfig
from trainer.strategies.builtin import PserverAsyncDeclaration
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import Message, Verb, text
from trainer.strategies.pserver.server.admission import Count, Probability
from trainer.strategies.pserver.worker.remote_model import RemoteTable
from trainer.weights.fresh_rows import RowInit

OLD, NEW = np.arange(0, 10, dtype=np.int64), np.arange(20, 30, dtype=np.int64)
BOTH = OLD.tolist() + NEW.tolist()
DENSE = np.ones(4)


def push(workers: list[Bare], ids: np.ndarray, age: int) -> None:
    """A push of each worker with these rows, all at that age; waited for."""
    clock = workers[0].client.sequence + 1
    asked = []
    for worker in workers:
        messages = worker.gradient(DENSE, ids, 1.0, 1.0, age)
        for message in messages:
            message.clock = clock
        asked.append((worker, worker.client.push(messages)))
    for worker, requests in asked:
        worker.client.wait(requests)


def shrink(worker: Bare, age: int) -> None:
    """What the first worker says when all have met."""
    ask = worker.client.ask
    worker.client.wait([ask(s, Message(Verb.SHRINK, records=[text({"age": age})])) for s in worker.client.servers])


def kept(cluster: Cluster, worker: Bare) -> list[int]:
    """Ids of the rows that are there, ascending."""
    found: list[int] = []
    for server in worker.client.servers:  # an answer, so that the server is done with what came before
        worker.client.wait([worker.client.ask(server, Message(Verb.STATS))])
        shard = cluster.servers[server].parameters.shard
        assert shard is not None
        found += whole(shard.tables[1].state())["ids"].tolist()
    return sorted(found)


def crew(cluster: Cluster) -> list[Bare]:
    """All workers of the cluster, the first of which has made the start."""
    first = Bare(cluster, 0)
    first.begin()
    return [first, *(Bare(cluster, rank) for rank in range(1, cluster.workers))]


def made(mode: str, workers: int, servers: int = 2, **strategy: Any) -> dict[str, Any]:
    return config(mode, workers, servers, **({} if mode == "sync" else {"launch_barrier": False}), **strategy)


@pytest.mark.parametrize("evict_by", ["steps", "event_time"])
def test_age_goes_on_where_the_loaded_run_ended(tmp_path: Path, evict_by: str) -> None:
    run = made("async", 1, evict_by=evict_by)
    run["plan"]["paths"]["run_dir"] = str(tmp_path)
    with Cluster(run) as cluster:
        [worker] = crew(cluster)
        push([worker], OLD, 100)
        target, written = tmp_path / "persistables", snapshot.begin(tmp_path / "persistables", 0)
        saves = [worker.client.ask(s, Message(Verb.SAVE, records=[text({"folder": str(written)})])) for s in (0, 1)]
        worker.client.wait(saves)
        snapshot.complete(written, 2, target)
        worker.die()
    run["config"]["strategy"]["load_from"] = str(target)
    model = nn.Linear(1, 1)
    for by, said in ((evict_by, 0), ({"steps": "event_time", "event_time": "steps"}[evict_by], 1)):
        strategy = run["config"]["strategy"] | {"evict_by": by, "evict_after": 5}
        config = RunConfig.of(run["config"] | {"strategy": strategy})
        refused = PserverAsyncDeclaration(**strategy).refuse_model(config, model, torch.optim.SGD(model.parameters()))
        assert sum(f"counted by {evict_by}" in str(error) for error in refused) == said  # another model is refused, too
    with Cluster(run) as cluster:
        [worker] = crew(cluster)
        began = 0 if evict_by == "steps" else 100  # a worker counts its own steps from 1; time is the data's
        push([worker], NEW, began + 20)
        shrink(worker, 21)
        assert kept(cluster, worker) == BOTH
        shrink(worker, 19)
        assert kept(cluster, worker) == NEW.tolist()
        worker.die()


def test_dropped_row_of_torch_s_own_table_comes_back_as_zeros() -> None:
    """The first worker has sent its values; nobody can draw them again."""
    with Cluster(made("async", 1, servers=1)) as cluster:
        [worker] = crew(cluster)
        spec = RemoteTable(1, "emb", nn.Embedding(1000, 3, sparse=True), 1, None).spec  # type: ignore[arg-type]
        assert spec.init == "zeros"
        table = cluster.servers[0].parameters.shard.tables[1]  # type: ignore[union-attr]
        table.init = RowInit(spec.init, spec.scale)
        table.assign(OLD, torch.ones(len(OLD), 3, dtype=torch.float64))
        push([worker], NEW, 100)
        shrink(worker, 10)
        assert kept(cluster, worker) == NEW.tolist()
        assert set(worker.look(OLD)[1].values()) == {0.0}
        worker.die()


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ({"count": 1, "probability": 1.0}, None),
        ({"count": 3, "probability": 1.0}, Count(3)),
        ({"count": 1, "probability": 0.5}, Probability(0.5)),
        ({"count": 3, "probability": 0.5}, Probability(0.5)),
    ],
)
def test_where_count_and_probability_are_set_the_probability_counts(entry: dict[str, float], rule: Any) -> None:
    with Cluster(made("async", 1, servers=1, entry=entry)) as cluster:
        [worker] = crew(cluster)
        assert cluster.servers[0].parameters.shard.tables[1].admission == rule  # type: ignore[union-attr]
        worker.die()
