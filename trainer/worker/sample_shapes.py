"""Whether a model accepts the data's samples; if not: which layer fails, with what input, and which key to set."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import schema
from trainer.config.instantiate import call_target, locate
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import first_line

IMAGE_DIMENSIONS = 3
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]
FETCHES = ("weights", "pretrained", "checkpoint_path")


@dataclass(frozen=True)
class NotTaken:
    """How a model failed on two samples of zeros: the error, and the layer that raised it.

    Attributes:
        error: what it raised.
        layer, module: the innermost layer at work, by its name; came: the shapes of its inputs.
        done: how many layers had returned.
    """

    error: Exception
    layer: str
    module: nn.Module
    came: str
    done: int

    def __str__(self) -> str:
        said = first_line(self.error)
        return f"its layer {self.layer} ({type(self.module).__name__}) got {self.came}: {said}" if self.layer else said

    @property
    def anywhere(self) -> bool:
        """Whether the model would also fail on a GPU: the layer is one of torch's own, which run on every device."""
        torchs_own = type(self.module).__module__.startswith("torch.nn.")
        return torchs_own and not any(p.is_meta for p in self.module.parameters())


class Followed:
    """Keeps track of the layers of a model that are running while it is called, the innermost last."""

    def __init__(self) -> None:
        self.at_work: list[tuple[nn.Module, str]] = []
        self.done = 0

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Context manager: hooks record when each layer of the model is called and returns."""
        hooks = [m.register_forward_pre_hook(self._begins) for m in model.modules()]
        hooks += [m.register_forward_hook(self._returns) for m in model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.at_work.append((module, " and ".join(_shown(one) for one in inputs if isinstance(one, torch.Tensor))))

    def _returns(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        while self.at_work.pop()[0] is not module:  # a layer inside broke, and this one went on
            pass
        self.done += 1


def _shown(tensor: torch.Tensor) -> str:
    """Format a batch's shape, e.g. ``(N, 3, 8, 8)``."""
    return f"({', '.join(['N', *map(str, tensor.shape[1:])])})" if tensor.dim() else "()"


@torch.no_grad()
def forward(model: nn.Module, facts: Facts, shape: Shape, train: bool, samples: int = 2) -> Any:
    """Call the model on so many samples of this shape, zeros, without gradients; returns its outputs, or why it does
    not take them."""
    return outputs_of(model, facts, shape, train, samples)


def outputs_of(model: nn.Module, facts: Facts, shape: Shape, train: bool, samples: int = 2) -> Any:
    """Call the model on so many samples of this shape, zeros; returns its outputs, or why it does not take them
    (:class:`NotTaken`).

    Inputs without a name that are no images may be numbers or ids: the model is called with both.
    """
    device = next(model.parameters()).device
    if isinstance(shape, dict):
        kinds = {name: torch.int64 if name in facts.integers else None for name in shape}
        return _called(
            model, {n: torch.zeros((samples, *s), dtype=kinds[n], device=device) for n, s in shape.items()}, train
        )
    found = _called(model, torch.zeros((samples, *shape), device=device), train)
    if not isinstance(found, NotTaken) or len(shape) == IMAGE_DIMENSIONS:
        return found
    as_ids = _called(model, torch.zeros((samples, *shape), dtype=torch.int64, device=device), train)
    return found if isinstance(as_ids, NotTaken) and as_ids.done <= found.done else as_ids


def _called(model: nn.Module, inputs: Any, train: bool) -> Any:
    try:
        return model.train(train)(inputs)
    except Exception as error:
        return _not_taken(model, inputs, error)


def _not_taken(model: nn.Module, inputs: Any, error: Exception) -> NotTaken:
    """Call the model once more, to find the layer."""
    followed = Followed()
    with suppress(Exception), followed.following(model):
        model(inputs)
    module, came = followed.at_work[-1] if followed.at_work else (model, "")
    return NotTaken(error, next(n for n, m in model.named_modules() if m is module), module, came, followed.done)


def fitting(config: RunConfig, facts: Facts, shape: Shape, train: bool) -> str:
    """Find the one or two model keys to set so that the model accepts the samples: ``model.in_channels=1``.

    Each key gets a number of the data's shape, and the model is tried on the meta device. Empty: no change works, or
    several do.
    """
    node = config.model
    if any(node.get(name) for name in FETCHES):
        return ""
    sizes = list(shape.values()) if isinstance(shape, dict) else [shape]
    numbers = sorted({n for size in sizes for n in (*size, math.prod(size))})
    keys = _numeric(node)
    for count in (1, 2):
        works = []
        for chosen in itertools.combinations(keys, count):
            for values in itertools.product(numbers, repeat=count):
                changes = dict(zip(chosen, values, strict=True))
                if all(keys[name] != value for name, value in changes.items()) and _fits(
                    node, changes, facts, shape, train
                ):
                    works.append(" ".join(f"{'' if n in node else '+'}model.{n}={v}" for n, v in changes.items()))
        if works:
            return works[0] if len(works) == 1 else ""
    return ""


def _numeric(node: Mapping[str, Any]) -> dict[str, int]:
    """The model's keys with integer values, from the config or by default, without its number of outputs."""
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(locate(str(node["_target_"]))).parameters
        node = {**{name: p.default for name, p in parameters.items()}, **node}
    left_out = ("num_classes", *schema.not_arguments("model", node))
    return {k: v for k, v in node.items() if isinstance(v, int) and not isinstance(v, bool) and k not in left_out}


def _fits(node: Mapping[str, Any], changes: Mapping[str, int], facts: Facts, shape: Shape, train: bool) -> bool:
    with suppress(Exception), torch.device("meta"):
        return not isinstance(forward(call_target({**node, **changes}, "model"), facts, shape, train), NotTaken)
    return False
