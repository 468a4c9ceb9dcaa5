"""Predicts the memory that one batch takes beside the parameters and their gradients, before a run.

A forward and a backward run on fake tensors, which have shapes and no values. Every tensor that an operation makes
counts until nothing refers to it, as in the allocator of a device. What a kernel takes inside is not seen.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.host.sharded import each_tensor
from trainer.models.blocks import chosen
from trainer.models.recomputed import recompute
from trainer.worker.model import autocast
from trainer.worker.probe import meta_model
from trainer.worker.sample_shapes import outputs_of


def of_a_batch(config: RunConfig, facts: Facts, precision: str, device: str, samples: int) -> int:
    """The most bytes that a batch takes in a forward and a backward, its inputs included; 0: not known.

    Args:
        device: ``cuda`` or ``cpu``. Without a GPU, kernels of the CPU are assumed, which keep about the same.
    """
    device = device if torch.cuda.is_available() else "cpu"
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            model = _fake(config, precision, device, mode)
            live = Live(model)
            with mode, live:
                with autocast(precision, torch.device(device))():
                    outputs = outputs_of(model, facts, facts.shape, True, samples)
                if not isinstance(outputs, torch.Tensor):
                    return 0
                outputs.sum().backward()  # type: ignore[no-untyped-call]
        return live.most
    except Exception:  # of a model whose operations fake tensors lack, or that reads values
        return 0
    finally:
        torch.random.set_rng_state(state)


def gathered(config: RunConfig, wrap: Any, all_blocks: bool) -> int:
    """The most numbers that a worker holds of whole parameters and gradients while strategy=sharded computes a block.

    That is what is in no block, a block's parameters and its gradient as it is reduced, and its parameters or those of
    the next block on their way.

    Args:
        wrap: modules that are gathered together. all_blocks: their parameters stay from the forward to the backward.
    """
    whole, *blocks = of_blocks(config, wrap)
    largest = max(blocks, default=whole)
    return whole + 2 * largest if all_blocks or not blocks else whole - sum(blocks) + 3 * largest


def of_blocks(config: RunConfig, wrap: Any) -> list[int]:
    """Numbers of parameters of the whole model, and of each of its blocks that are gathered together."""
    model = meta_model(config)
    return [sum(p.numel() for p in part.parameters()) for part in (model, *chosen(model, wrap, "strategy.wrap"))]


def _fake(config: RunConfig, precision: str, device: str, mode: FakeTensorMode) -> nn.Module:
    """The model with fake parameters and buffers on the device."""
    model, made = meta_model(config), dict[int, torch.Tensor]()
    dtype = torch.float64 if precision == "fp64" else None

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        return FakeTensor(mode, empty, torch.device(device))

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(fake(parameter.detach()), parameter.requires_grad)
            module._parameters[name] = None if parameter is None else made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake(buffer)
    if dtype is not None:
        model.register_forward_pre_hook(lambda _, inputs: each_tensor(inputs, _as(dtype)))
    if config.recompute != "none":
        recompute(chosen(model, config.recompute, "recompute"))
    return model


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active and that something still refers to.

    Attributes:
        most: the most of them at any time, without gradients of parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.sizes: Any = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        for tensor in (*model.parameters(), *model.buffers()):
            self.sizes[tensor.untyped_storage()] = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._leave_out_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.sizes:
            return
        self.sizes[storage] = size = [storage.nbytes()]
        self.now += size[0]
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: list[int]) -> None:
        self.now -= size[0]
        size[0] = 0  # it may be left out and then freed

    def _leave_out_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and (size := self.sizes.get(parameter.grad.untyped_storage())):
            self._forget(size)
