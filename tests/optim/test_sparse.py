"""Embedding tables get the optimizer's sparse counterpart: written out by hand, and by torch on dense gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.config.instantiate import call_target
from trainer.errors import UserError
from trainer.optim.gradient_clipping import clip_norm
from trainer.optim.sparse import DenseAndSparse, RowwiseAdagrad, SparseRule, rule_of, sparse_optimizer
from trainer.optim.updater import Updater

ROWS, DIM = 6, 3


def node(target: str, **keys: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{target}", "lr": 0.5, "weight_decay": 0.0, "sparse": "auto", **keys}


def rule(config: dict[str, Any]) -> SparseRule:
    return rule_of(config, call_target(config, "optimizer", [torch.zeros(1, requires_grad=True)]))


def table(seed: int = 0) -> nn.Embedding:
    torch.manual_seed(seed)
    return nn.Embedding(ROWS, DIM, sparse=True, dtype=torch.float64)


def gradients(module: nn.Embedding, step: int) -> torch.Tensor:
    """A sparse gradient with repeated rows, of which row 5 never has one; returns it dense."""
    ids = torch.tensor([[0, 1, 1], [2, 2, 2], [4, 0, 3]])[step % 3]
    weight = torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    module.zero_grad()
    (module(ids) * weight).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.is_sparse
    return module.weight.grad.to_dense()


CASES = {
    "sgd": (node("SGD", weight_decay=0.1), torch.optim.SGD, {}),
    "adagrad": (
        node("Adagrad", initial_accumulator_value=0.2),
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sgd_and_adagrad_do_what_they_do_with_dense_gradients(name: str) -> None:
    config, dense, options = CASES[name]
    chosen = rule(config)
    assert chosen.name == name
    ours, other = table(), nn.Parameter(table().weight.detach().clone())
    one, two = sparse_optimizer(chosen, [ours.weight]), dense([other], lr=0.5, **options)
    for step in range(4):
        other.grad = gradients(ours, step)
        one.step()
        two.step()
    torch.testing.assert_close(ours.weight.detach(), other.detach(), rtol=0, atol=1e-14)


def test_adam_moves_the_touched_rows_alone() -> None:
    for target in ("Adam", "AdamW"):
        chosen = rule(node(target, betas=[0.8, 0.9], eps=1e-6))
        assert chosen.name == "adam" and tuple(chosen.numbers["betas"]) == (0.8, 0.9) and chosen.numbers["eps"] == 1e-6
    module = table()
    truth = module.weight.detach().numpy().copy()
    first, second = np.zeros_like(truth), np.zeros_like(truth)
    optimizer = sparse_optimizer(chosen, [module.weight])
    for step in range(5):
        g = gradients(module, step).numpy()
        optimizer.step()
        touched = np.abs(g).sum(1) > 0
        first[touched] += 0.2 * (g - first)[touched]
        second[touched] += 0.1 * (g**2 - second)[touched]
        size = 0.5 * np.sqrt(1 - 0.9 ** (step + 1)) / (1 - 0.8 ** (step + 1))
        truth[touched] -= (size * first / (np.sqrt(second) + 1e-6))[touched]
    np.testing.assert_allclose(module.weight.detach().numpy(), truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_rowwise_adagrad_is_its_formula(start: float) -> None:
    module, dense = table(), nn.Parameter(table().weight.detach().clone())
    truth, total = module.weight.detach().numpy().copy(), np.full(ROWS, start)
    one, two = (RowwiseAdagrad([p], 0.5, start, 1e-8) for p in (module.weight, dense))
    for step in range(4):
        dense.grad = gradients(module, step)
        g = dense.grad.numpy().copy()
        one.step()
        two.step()
        total += (g**2).mean(1)
        truth -= 0.5 * g / (np.sqrt(total) + 1e-8)[:, None]
    np.testing.assert_allclose(module.weight.detach().numpy(), truth, rtol=0, atol=1e-13)
    np.testing.assert_allclose(dense.detach().numpy(), truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "config",
    [node("SGD", momentum=0.9), node("RMSprop"), node("Adam", amsgrad=True), node("LBFGS")],
    ids=lambda config: config["_target_"],
)
def test_optimizers_that_move_every_row_are_refused_unless_a_rule_is_named(config: dict[str, Any]) -> None:
    if "LBFGS" in config["_target_"]:
        config.pop("weight_decay")
    with pytest.raises(UserError, match=r"no counterpart.*Type instead: optimizer.sparse=adagrad"):
        rule(config)
    for name in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
        chosen = rule({**config, "sparse": name})
        assert chosen.name == name and chosen.lr == 0.5
        sparse_optimizer(chosen, [table().weight])


def test_clipping_counts_sparse_gradients_coalesced() -> None:
    module, linear = table(), nn.Linear(2, 2).double()
    whole = gradients(module, 1)
    linear(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    parameters = [module.weight, *linear.parameters()]
    expected = torch.cat([whole.flatten(), *[p.grad.flatten() for p in linear.parameters()]])
    norm = clip_norm(parameters, 0.5)
    assert norm.item() == pytest.approx(expected.norm().item(), rel=1e-14)
    clipped = torch.cat([p.grad.to_dense().flatten() for p in parameters])
    torch.testing.assert_close(clipped, expected * 0.5 / (norm + 1e-6))
    clip_norm(parameters, 1e9)
    torch.testing.assert_close(torch.cat([p.grad.to_dense().flatten() for p in parameters]), clipped, rtol=0, atol=0)
    assert clip_norm([torch.ones(1)], 1.0) == 0


def both(**options: Any) -> tuple[nn.Embedding, nn.Linear, Updater]:
    module, linear = table(), nn.Linear(DIM, 1).double()
    dense = torch.optim.AdamW(linear.parameters(), lr=0.1)
    adagrad = SparseRule("adagrad", 0.2, {})
    both = DenseAndSparse(dense, sparse_optimizer(adagrad, [module.weight]), adagrad)
    return module, linear, Updater(both, lambda step: 1.0 if step == 0 else 0.0, **options)


def backward(module: nn.Embedding, linear: nn.Linear, updater: Updater, factor: float = 1.0) -> None:
    updater.backward(linear(module(torch.tensor([0, 1, 1]))).sum() * factor)


def test_two_optimizers_follow_one_schedule_and_state() -> None:
    module, linear, updater = both()
    seen = [p.detach().clone() for p in (module.weight, linear.weight)]
    backward(module, linear, updater)
    updater.step()
    moved = [p.detach().clone() for p in (module.weight, linear.weight)]
    assert all(not torch.equal(a, b) for a, b in zip(seen, moved, strict=True))
    assert torch.equal(moved[0][2:], seen[0][2:]), "rows that were not touched stay"
    assert module.weight.grad is None and linear.weight.grad is None
    state = updater.optimizer.state_dict()
    backward(module, linear, updater)
    updater.step()  # at a learning rate of 0
    assert torch.equal(module.weight, moved[0]) and torch.equal(linear.weight, moved[1])
    *_, again = both()
    again.optimizer.load_state_dict(state)
    sums = [p["sum"] for p in again.optimizer.parts["sparse"].state.values()]
    assert sums and sums[0].sum() > 0


def test_the_loss_scaler_skips_both_or_none() -> None:
    module, linear, updater = both(loss_scaling=True, clip_norm=1.0)
    seen = [p.detach().clone() for p in (module.weight, linear.weight)]
    backward(module, linear, updater, float("inf"))
    updater.step()
    assert torch.equal(module.weight, seen[0]) and torch.equal(linear.weight, seen[1])
    updater.factor = lambda step: 1.0
    backward(module, linear, updater)
    updater.step()
    assert not torch.equal(module.weight, seen[0]) and not torch.equal(linear.weight, seen[1])
