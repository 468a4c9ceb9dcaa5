"""The order of a model's layers, for learning rates that fall towards the input (``optimizer.layer_decay``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms; all batch and instance norms derive from the first."""


@dataclass(frozen=True)
class Unit:
    """A layer of a model: its module's name, the name of the module that holds it, and whether it is only a norm."""

    name: str
    parent: str
    norm: bool


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The layer number of each parameter (by its first name), from 0 at the input.

    The layers are the model's children in the order of their definition. Each element of an ``nn.Sequential`` or
    ``nn.ModuleList`` is a layer. A child with more than half of the model's parameters and such a list inside, as
    a backbone or an encoder, is divided further: each block of a ResNet or transformer is a layer. A norm belongs
    to the layer before it; a norm after a list (a transformer's last norm), to the layer after it. Parameters of
    divided modules (position embeddings, class tokens) belong to layer 0, as in BEiT (Bao et al., 2022) and timm.
    """
    units = list(_units(model, "", _size(model) / 2))
    numbers, number = {}, -1
    for place, unit in enumerate(units):
        before = units[place - 1] if place else None
        joins = unit.norm and before is not None and (before.parent == unit.parent or place == len(units) - 1)
        waits = unit.norm and not joins and place < len(units) - 1
        if not joins:
            number += 1
        numbers[unit.name] = number
        if waits:  # the next layer has this number, too
            number -= 1
    return {name: _number(name, numbers) for name, _ in model.named_parameters()}


def _number(parameter: str, numbers: dict[str, int]) -> int:
    owners = [name for name in numbers if parameter.startswith(f"{name}.")]
    return numbers[max(owners, key=len)] if owners else 0


def _units(module: nn.Module, name: str, half: float) -> Iterator[Unit]:
    for child_name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        path = f"{name}.{child_name}" if name else child_name
        if type(child) in (nn.Sequential, nn.ModuleList) or (_size(child) > half and _holds_a_list(child)):
            yield from _units(child, path, half)
        else:
            yield Unit(path, name, isinstance(child, NORMS))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _holds_a_list(module: nn.Module) -> bool:
    lists = (m for m in module.modules() if m is not module and type(m) in (nn.Sequential, nn.ModuleList))
    return any(any(True for _ in m.parameters()) for m in lists)
