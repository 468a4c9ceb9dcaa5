"""Convolutions whose kernel is larger than their input: gradients in bf16 are those of fp32, and always the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer.models.strided_bf16 import has_idle_tap, write_all_gradients


def fill_freed_memory() -> None:
    """Leave numbers that nobody can miss where the next tensors will be."""
    blocks = [
        torch.full((n,), float("nan"), dtype=d) for n in (9 * 64 * 64, 1 << 18) for d in (torch.float32, torch.bfloat16)
    ]
    del blocks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_of_small_strided_convolutions_in_bf16(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False))
    images = torch.randn(16, 64, size, size)
    model(images).sum().backward()
    truth = model[0].weight.grad.clone()
    write_all_gradients(model)
    seen = set()
    for _ in range(20):
        model.zero_grad(set_to_none=True)
        fill_freed_memory()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(images)
        assert outputs.dtype == (torch.float32 if size < 4 else torch.bfloat16)
        outputs.float().sum().backward()
        torch.testing.assert_close(model[0].weight.grad, truth, rtol=0.02, atol=0.1)
        seen.add(model[0].weight.grad.numpy().tobytes())
    assert len(seen) == 1


def test_model_is_said_to_compute_otherwise_and_stays_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1))
    keys = list(model.state_dict())
    write_all_gradients(model)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.fill_(7)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(twin(torch.ones(1, 4, 1, 1)), torch.full((1, 4, 1, 1), 7.0))
        for _ in range(3):
            assert not torch.equal(model(torch.ones(1, 4, 1, 1)), torch.full((1, 4, 1, 1), 7.0))
    printed = capsys.readouterr().out
    assert printed.count("is computed in fp32, not in bf16") == 2 and "1x1" in printed  # once by each


FITTING = [
    (size, kernel, stride, padding)
    for size in range(1, 6)
    for kernel in (1, 2, 3, 5, 7)
    for stride in (1, 2, 3)
    for padding in (0, 1, 2)
    if size + 2 * padding >= kernel
]


def idle(size: int, kernel: int, stride: int, padding: int) -> bool:
    """Whether a tap of the kernel gets no gradient."""
    convolution = nn.Conv1d(1, 1, kernel, stride, padding, bias=False, dtype=torch.float64)
    convolution(torch.ones(1, 1, size, dtype=torch.float64)).sum().backward()
    return bool((convolution.weight.grad == 0).any())


def test_idle_taps_are_those_without_a_gradient() -> None:
    assert len(FITTING) > 100
    assert [case for case in FITTING if has_idle_tap(*case, 1) != idle(*case)] == []
