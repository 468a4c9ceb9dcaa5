"""What a GPU exchanges with servers in one piece are the numbers that a CPU exchanges parameter by parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.strategies.pserver.worker.agreement import agree_on
from trainer.strategies.pserver.worker.clipping import clip_factor, clip_values
from trainer.strategies.pserver.worker.remote_model import DenseMap


def model(seed: int) -> nn.Module:
    """Its gradients are there for all parameters but one; some parameters are cut between servers."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 2))
    net = net.to(memory_format=torch.channels_last)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    net[4].bias.grad = None
    return net


def mapped(net: nn.Module, servers: int, on_gpu: bool) -> DenseMap:
    made = DenseMap(list(net.named_parameters()), servers, "round_robin", 64)
    made.on_gpu = on_gpu  # the way of a GPU, with tensors of the CPU
    return made


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_gradients_and_values_are_those_of_each_parameter(servers: int, factor: float) -> None:
    net = model(1)
    one, other = (mapped(net, servers, on_gpu) for on_gpu in (True, False))
    for server in range(servers):
        room = torch.full((one.size(server),), math.nan)
        assert one.gradients(server, factor, room) is room
        assert torch.equal(room, other.gradients(server, factor))
        assert torch.equal(one.values(server), other.values(server))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("add", [False, True])
def test_what_servers_answer_lands_in_the_same_places(servers: int, add: bool) -> None:
    nets = model(2), model(2)
    for net, on_gpu in zip(nets, (True, False), strict=True):
        dense = mapped(net, servers, on_gpu)
        for server in range(servers):
            dense.write(server, torch.randn(dense.size(server), generator=torch.Generator().manual_seed(server)), add)
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride(), name
        assert not torch.equal(a, dict(model(2).named_parameters())[name]), "something was written"


def test_a_clipped_gradient_has_the_norm_of_all_its_parts() -> None:
    net = model(3)
    rows: dict[int, Any] = {1: (np.arange(4), torch.randn(4, 6)), 2: (np.arange(1), torch.randn(1, 2))}
    gradients = [p.grad for p in net.parameters() if p.grad is not None] + [values for _, values in rows.values()]
    norm = float(torch.cat([g.double().flatten() for g in gradients]).norm())
    assert clip_factor(net.parameters(), rows, 0.5) == pytest.approx(0.5 / (norm + 1e-6), rel=1e-14)
    assert clip_factor(net.parameters(), rows, 2 * norm) == clip_factor(net.parameters(), rows, None) == 1.0
    assert clip_factor([], {}, 1.0) == 1.0
    clip_values(net.parameters(), rows, 0.1)
    clip_values([], {}, 0.1)
    assert all(g.abs().max() <= 0.1 for g in gradients) and any(g.abs().max() == pytest.approx(0.1) for g in gradients)


@pytest.mark.parametrize(("first", "average"), [(True, False), (False, True), (True, True)])
def test_workers_agree_on_buffers_by_one_sum(first: bool, average: bool) -> None:
    own = [torch.tensor([1.0, 3.0]), torch.tensor(4), torch.tensor([[2.0]], dtype=torch.float64)]
    asked = []

    def with_another(values: torch.Tensor) -> torch.Tensor:
        """Another worker, which is the first if this one is not, has 9 everywhere."""
        asked.append(values)
        numbers = torch.tensor([1.0, *[9.0 * average] * 2, 0.0, 9.0 * average], dtype=torch.float64)
        if not first:
            numbers = torch.tensor([1.0, 9.0, 9.0, 9.0, 9.0], dtype=torch.float64)
        return values + numbers

    agree_on(own, with_another, first, average)
    assert len(asked) == 1 and asked[0].device.type == "cpu"
    wanted = [[5.0, 6.0], 4 if first else 9, [[5.5]]] if average else [[1.0, 3.0], 4, [[2.0]]]
    assert [one.tolist() for one in own] == wanted
