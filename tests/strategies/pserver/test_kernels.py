"""The sparse optimizers against torch.optim on a sparse embedding, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trainer.strategies.pserver.tables.kernels import Adagrad, Adam, Kernel, RowwiseAdagrad, Sgd, kernel

ROWS, DIM, STEPS = 30, 5, 50


def batches(seed: int = 0):
    """Per step: row ids with repeats (24,) and the gradient of each lookup (24, DIM)."""
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        yield torch.from_numpy(random.integers(0, ROWS, 24)), torch.from_numpy(random.standard_normal((24, DIM)))


def start() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(9).standard_normal((ROWS, DIM)))


def with_torch(optimizer_type, **hyperparameters) -> torch.Tensor:
    embedding = nn.Embedding(ROWS, DIM, sparse=True, _weight=start())
    optimizer = optimizer_type(embedding.parameters(), **hyperparameters)
    for step, (ids, gradients) in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        (embedding(ids) * gradients).sum().backward()
        optimizer.step()
    return embedding.weight.detach()


def with_kernel(kernel: Kernel) -> torch.Tensor:
    values = start()
    state = torch.full((ROWS, kernel.state_columns(DIM)), kernel.initial, dtype=torch.float64)
    for step, (ids, gradients) in enumerate(batches()):
        unique, inverse = torch.unique(ids, return_inverse=True)
        summed = torch.zeros(len(unique), DIM, dtype=torch.float64).index_add_(0, inverse, gradients)
        rows, slots = values[unique], state[unique]
        kernel.apply(rows, slots, summed, 0.1 / (1 + step), step + 1)
        values[unique], state[unique] = rows, slots
    return values


@pytest.mark.parametrize(
    ("ours", "theirs", "hyperparameters"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("adagrad", torch.optim.Adagrad, {"eps": 1e-3, "initial_accumulator_value": 0.3}),
        ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.3}),
        ("adam", torch.optim.SparseAdam, {}),
        ("adam", torch.optim.SparseAdam, {"betas": (0.8, 0.95), "eps": 1e-4}),
        ("adam", torch.optim.SparseAdam, {"betas": (0.3, 0.4)}),
    ],
)
def test_fifty_steps_equal_torch_optim(ours, theirs, hyperparameters):
    found = with_kernel(kernel(ours, **hyperparameters))
    torch.testing.assert_close(found, with_torch(theirs, **hyperparameters), rtol=0, atol=1e-12)


def test_rowwise_adagrad_equals_its_formula():
    eps, initial = 1e-3, 0.2
    values, total = start().numpy().copy(), np.full(ROWS, initial)
    for step, (ids, gradients) in enumerate(batches()):
        for row in set(ids.tolist()):
            g = gradients.numpy()[ids.numpy() == row].sum(axis=0)
            total[row] += sum(x * x for x in g) / DIM
            values[row] -= 0.1 / (1 + step) * g / (total[row] ** 0.5 + eps)
    found = with_kernel(RowwiseAdagrad(eps=eps, initial_accumulator_value=initial))
    np.testing.assert_allclose(found.numpy(), values, rtol=0, atol=1e-12)


def test_the_factory_takes_what_a_kernel_has_and_ignores_the_rest():
    node = {"betas": [0.5, 0.6], "eps": 1e-5, "initial_accumulator_value": 2, "momentum": 0.9, "lr": 3.0}
    assert kernel("sgd", **node) == Sgd()
    assert kernel("adagrad", **node) == Adagrad(eps=1e-5, initial_accumulator_value=2.0)
    assert kernel("rowwise_adagrad", **node) == RowwiseAdagrad(eps=1e-5, initial_accumulator_value=2.0)
    assert kernel("adam", **node) == Adam(betas=(0.5, 0.6), eps=1e-5)
    assert [kernel(name).name for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")] == [
        "sgd",
        "adagrad",
        "rowwise_adagrad",
        "adam",
    ]
    with pytest.raises(ValueError, match="lion"):
        kernel("lion")


@pytest.mark.parametrize(("name", "columns"), [("sgd", 0), ("adagrad", 8), ("rowwise_adagrad", 1), ("adam", 16)])
def test_state_columns(name, columns):
    assert kernel(name).state_columns(8) == columns
