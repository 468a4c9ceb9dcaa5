"""Recomputes the activations of blocks in the backward, in place of keeping them from the forward (``recompute``).

A block keeps its inputs alone (Chen et al., 2016, arXiv:1604.06174). Its forward runs a second time in the backward,
with the same random numbers, and leaves buffers (the statistics of batch norms) as the first one has made them. So the
numbers are those of a run without it, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.models.blocks import chosen
from trainer.models.embedding_tables import tables


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make these modules compute their activations again; names and parameters stay as they are."""
    for block in blocks:
        block.forward = functools.partial(_forward, block, block.forward)  # type: ignore[method-assign]


def check(config: RunConfig, model: nn.Module) -> None:
    """Refuse ``recompute`` where the model has no such block or has tables, or is compiled or captured.

    Raises:
        UserError: it cannot be.
    """
    what, instead = f"recompute={spelled(config.recompute)}", "recompute=none"
    if not chosen(model, config.recompute, "recompute"):
        raise UserError(what, "the model has no blocks that come again", f"the name or class of modules, or {instead}")
    if any(tables(model)):
        raise UserError(what, "the rows of embedding tables would be looked up twice", instead)
    if config.compile is True:
        raise UserError("compile=true", "the compiler decides itself what it recomputes", f"compile=false or {instead}")
    if config.execution.cuda_graph:
        raise UserError("execution.cuda_graph=true", "a graph cannot set random numbers back", instead)


def _forward(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    return checkpoint(
        forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_forward(block)), **named
    )


@contextmanager
def _second_forward(block: nn.Module) -> Iterator[None]:
    """Context manager: what a forward changes in buffers, such as the statistics of a batch norm, is dropped."""
    before = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    for module, buffers in before:
        module._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)
