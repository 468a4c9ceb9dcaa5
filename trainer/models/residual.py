"""Starts residual blocks as identities by zeroing the scale of each block's last norm (Goyal et al., 2017)."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WEIGHED = (nn.modules.conv._ConvNd, nn.Linear)
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
PASSED = (nn.Dropout, nn.Identity)


class NoResidualBlocks(ValueError):
    """The error for a model in which no residual block ends in a norm with a scale; its text gives the reason."""


class _Tracer(fx.Tracer):
    """A tracer that does not trace into norms, also of other libraries."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, NORMS) or super().is_leaf_module(m, module_qualified_name)


def last_norms(model: nn.Module) -> list[str]:
    """The names of the norms whose output is added to a shortcut, one per residual block, in the model's order.

    They are found in the traced graph. Of the two branches of an addition, the one with more layers is the block's: a
    shortcut has at most one convolution. The last operation of that branch is the norm.

    Raises:
        NoResidualBlocks: there are no such blocks, or the model cannot be traced.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(model)
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise NoResidualBlocks(f"its graph cannot be read ({type(error).__name__}: {line})") from error
    modules = dict(model.named_modules())
    found = []
    for node in graph.nodes:
        branches = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if node.target not in ADDITIONS or len(branches) != 2:
            continue
        one, other = (_layers(b, _ancestors(branches[1 - n]), modules) for n, b in enumerate(branches))
        norm = _final_norm(branches[one < other], modules) if one != other else None
        if norm is not None and norm not in found:
            found.append(norm)
    if not found:
        raise NoResidualBlocks("it has no residual block whose branch ends in a norm")
    return found


@torch.no_grad()
def zero_last_norms(model: nn.Module) -> None:
    """Set the scale of every residual block's last norm to zero.

    Raises:
        NoResidualBlocks: there are no such blocks.
    """
    modules = dict(model.named_modules())
    for name in last_norms(model):
        nn.init.zeros_(modules[name].weight)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all nodes that it depends on."""
    seen, open_ = set(), [node]
    while open_:
        if (one := open_.pop()) not in seen:
            seen.add(one)
            open_ += one.all_input_nodes
    return seen


def _layers(branch: fx.Node, elsewhere: set[fx.Node], modules: dict[str, Any]) -> int:
    """Convolutions and linear layers of a branch that the other branch does not have."""
    own = (n for n in _ancestors(branch) if n not in elsewhere and n.op == "call_module")
    return sum(isinstance(modules[str(n.target)], WEIGHED) for n in own)


def _final_norm(node: fx.Node, modules: dict[str, Any]) -> str | None:
    """The norm at the end of a branch, before operations without effect in evaluation."""
    while True:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, NORMS):
            return str(node.target) if getattr(module, "weight", None) is not None else None
        dropped = node.op == "call_function" and getattr(node.target, "__name__", "") in ("stochastic_depth", "dropout")
        if not (isinstance(module, PASSED) or dropped) or not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
