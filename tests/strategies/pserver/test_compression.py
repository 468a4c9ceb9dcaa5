"""int8 loses nothing for good: what rounding takes from a gradient is in one of the next."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.strategies.pserver.harness import Cluster, config
from tests.strategies.pserver.test_versions import net, placed
from trainer.strategies.pserver.protocol.compression import Feedback, decode, encode
from trainer.strategies.pserver.protocol.messages import Kind, Record
from trainer.strategies.pserver.worker.geo import PserverGeo

PUSHES, SIZE = 200, 1300


def gradients() -> torch.Tensor:
    """(PUSHES, SIZE) float64: in each block of values that share a scale a few great ones, beside which most round to
    0."""
    random = np.random.default_rng(4)
    values = random.normal(0.003, 0.002, size=(PUSHES, SIZE))
    values[:, ::100] = random.normal(size=(PUSHES, SIZE // 100))
    return torch.from_numpy(values)


def decoded(records: list[Record]) -> torch.Tensor:
    return decode(records[0].array, records[1].array if len(records) > 1 else None, torch.float64)


@pytest.mark.parametrize("form", ["int8", "bf16", "full"])
def test_what_has_arrived_and_the_last_error_are_what_was_sent(form: str) -> None:
    memory, sent, arrived = Feedback(form), gradients(), torch.zeros(SIZE, dtype=torch.float64)
    for values in sent:
        before = values.clone()
        arrived += decoded(memory.encode(values, Kind.DENSE, 0))
        assert torch.equal(values, before)
    error = memory.errors[0] if form != "full" else torch.zeros(SIZE, dtype=torch.float64)
    torch.testing.assert_close(arrived + error, sent.sum(0), rtol=0, atol=1e-11)
    assert error.abs().max() <= sent.abs().max() / 64, "no more than about a step of the last push is missing"


def test_without_its_memory_int8_would_lose_what_is_small() -> None:
    sent = gradients()
    small = [n for n in range(SIZE) if n % 100]
    lost = (torch.stack([decoded(encode(v, Kind.DENSE, 0, "int8")) for v in sent]).sum(0) - sent.sum(0))[small]
    assert lost.mean() < -0.5 * sent.sum(0)[small].mean()


def test_a_worker_remembers_what_int8_took_from_its_pushes() -> None:
    pushes, small = 40, 0.002
    run = config("async", 1, 2, launch_barrier=False, independent_recv_thread=False, slice_above=4, wire="int8")
    with Cluster(run) as cluster:
        worker = placed(cluster)
        for _ in range(pushes):
            worker.prepare(SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True))
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, small)
            for server in worker.client.servers:
                piece = worker.dense.pieces[server][0]
                dict(worker.model.named_parameters())[piece.name].grad.view(-1)[piece.start] = 1.0
            worker.step(1)
        worker.finish_pushes()
        start, parameters = net(), {}
        for server in cluster.servers:
            offset = 0
            for name, first, stop in server.parameters.shard.layout.pieces:
                parameters.setdefault(name, {})[first] = server.parameters.shard.vector[offset : offset + stop - first]
                offset += stop - first
        for name, value in start.named_parameters():
            found = torch.cat([part for _, part in sorted(parameters[name].items())])
            moved = (value.detach().view(-1) - found).view(-1)
            moved[moved > 1] = pushes * small  # where the great ones are; sgd with a learning rate of 1
            torch.testing.assert_close(moved, torch.full_like(moved, pushes * small), rtol=0, atol=1 / 127)
        worker.close()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_differences_of_geo_and_their_answers_are_always_full(wire: str) -> None:
    with Cluster(config("geo", 1, 1, wire=wire)) as cluster:
        worker = PserverGeo(cluster.run["config"]["strategy"], cluster.seat("worker", 0))
        worker.setup(net(), cluster.updaters)
        with torch.no_grad():
            for p in worker.model.parameters():
                p += 1e-9  # far below the digits of bfloat16
        worker.begin_exchange()
        assert worker.exchange is not None
        [request] = worker.exchange.requests
        assert request.message.need(Kind.DENSE).dtype == np.float64
        np.testing.assert_allclose(request.message.need(Kind.DENSE), 1e-9, atol=1e-15)
        worker.client.wait([request])
        assert request.answer is not None and request.answer.need(Kind.DENSE).dtype == np.float64
        worker.close()
