"""The moving average of the weights is torch's own, with a warm-up that follows its formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer.config.schema import EmaConfig
from trainer.optim.averaged import AveragedWeights, averaged_weights


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def train(model: nn.Module, step: int) -> None:
    """A step of SGD on noise, which also moves the batch norm's statistics."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(5, 3, generator=generator, dtype=torch.float64)).square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
            p.grad = None


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1.0])
def test_the_average_is_torchs(decay: float) -> None:
    model = net()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    theirs.update_parameters(model)  # its first call copies: the start
    ours = AveragedWeights(model, decay)
    for step in range(1, 21):
        train(model, step)
        ours.follow(step)
        theirs.update_parameters(model)
    with ours.in_place():
        for name, value in model.state_dict().items():
            if value.is_floating_point():  # torch averages the count of batches too, which is none
                torch.testing.assert_close(value, theirs.module.state_dict()[name], rtol=0, atol=1e-13)
        assert model[1].num_batches_tracked == 20


def test_the_warmup_follows_its_formula() -> None:
    model = net()
    ours = AveragedWeights(model, 0.8, warmup=True, gamma=2.0, power=0.75)
    weights = [model[0].weight.detach().clone()]
    expected = weights[0]
    for step in range(1, 31):
        train(model, step)
        ours.follow(step)
        decay = min(0.8, 1 - (1 + (step - 1) / 2.0) ** -0.75)
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
    with ours.in_place():
        torch.testing.assert_close(model[0].weight.detach(), expected, rtol=0, atol=1e-13)
    assert AveragedWeights(model, 0.8, warmup=True).decay_at(0) == 0.0 and ours.decay_at(10**6) == 0.8


def test_an_update_is_taken_in_once() -> None:
    model = net()
    ours = AveragedWeights(model, 0.5)
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1.0
    for _ in range(3):
        ours.follow(1)
    ours.follow(0)
    with ours.in_place():
        torch.testing.assert_close(model[0].weight.detach(), start + 0.5)


def test_the_model_has_its_own_weights_again_afterwards() -> None:
    model = net()
    ours = AveragedWeights(model, 0.9)
    train(model, 1)
    ours.follow(1)
    before = state(model)
    with pytest.raises(RuntimeError), ours.in_place():
        assert not torch.equal(model[0].weight, before["0.weight"])
        raise RuntimeError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Meeting:
    """Sums over workers that all have come to, one after the other: each call gets the others' vectors."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.brought: list[torch.Tensor] = []
        self.sums: torch.Tensor | None = None

    def members(self) -> tuple[int, int]:
        return self.index, self.count

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.brought.append(values.clone())
        return values if self.sums is None else self.sums


def agreed(averages: list[AveragedWeights], mean: bool) -> None:
    """Let the workers' averages agree: once to see what each brings, then with the sum."""
    meetings = [Meeting(i, len(averages)) for i in range(len(averages))]
    for average, meeting in zip([copy.deepcopy(a) for a in averages], meetings, strict=True):
        average.agree(meeting, mean)
    total = sum(m.brought[0] for m in meetings)
    for average, meeting in zip(averages, meetings, strict=True):
        meeting.sums = total
        average.agree(meeting, mean)


def test_the_mean_of_replicas_averages_is_the_average_of_their_mean() -> None:
    start, whole = net(), net()
    replicas = [copy.deepcopy(start) for _ in range(3)]
    averages = [AveragedWeights(m, 0.7) for m in replicas]
    truth = AveragedWeights(whole, 0.7)
    for step in range(1, 13):
        for rank, model in enumerate(replicas):
            train(model, 100 * rank + step)
        mean = [torch.stack(p).mean(0) for p in zip(*(list(m.parameters()) for m in replicas), strict=True)]
        with torch.no_grad():
            for model in [whole, *(replicas if step % 4 == 0 else [])]:  # local SGD's average
                for p, value in zip(model.parameters(), mean, strict=True):
                    p.copy_(value)
        for average in (truth, *averages):
            average.follow(step)
        if step == 6:
            agreed(averages, mean=True)
    agreed(averages, mean=True)
    for average, model in zip(averages, replicas, strict=True):
        with average.in_place(), truth.in_place():
            for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p, expected, rtol=0, atol=1e-13)
            assert torch.equal(model[1].running_mean, replicas[0][1].running_mean) or model is not replicas[0]
    assert len({average.average[-2].sum().item() for average in averages}) == 1, "the first worker's statistics"


def test_workers_with_one_model_exchange_the_buffers_alone() -> None:
    averages = [AveragedWeights(net(), 0.7) for _ in range(2)]
    train(averages[0].model, 1), train(averages[1].model, 2)
    for average in averages:
        average.follow(1)
    before = [t.clone() for t in averages[1].average]
    agreed(averages, mean=False)
    parameters = averages[0].buffers
    assert all(torch.equal(a, b) for a, b in zip(averages[1].average[:parameters], before, strict=False))
    assert all(
        torch.equal(a, b)
        for a, b in zip(averages[0].average[parameters:], averages[1].average[parameters:], strict=True)
    )


@pytest.mark.parametrize(("decay", "there"), [(None, False), (0.0, True), (0.99, True)])
def test_there_is_an_average_where_a_decay_is_given(decay: Any, there: bool) -> None:
    assert (averaged_weights(net(), EmaConfig(decay)) is not None) == there
