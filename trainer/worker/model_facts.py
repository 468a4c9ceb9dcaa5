"""Facts of a built model that planning needs: its norm layers, and its repeated blocks."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from trainer.config.run_config import RunConfig

NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Layers that normalise, with the classes made of them."""


def in_blocks(config: RunConfig, model: nn.Module) -> float:
    """The share of the parameters in repeated blocks; 0 where nothing is compiled."""
    if not config.compile:
        return 0.0
    from trainer.worker.compiled_model import share_in_blocks

    return share_in_blocks(model)


def norms_of(model: nn.Module) -> tuple[str, ...]:
    """The kinds of the model's norm layers."""
    return tuple(sorted({type(module).__name__ for module in model.modules() if isinstance(module, NORMS)}))
