"""A user's metrics for validations, with torchmetrics' interface, exact over any number of workers.

Every worker updates its own object with its share of the samples. Then the objects' states travel through the
strategy's sum, each worker's in a place of its own, and every worker puts them together as the metric says and
computes.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer.config.instantiate import call_target
from trainer.errors import RunFailed, UserError, failed, first_line
from trainer.metrics.exchange import Total, exchanged

METHODS = ("update", "compute", "reset")
Scores = Callable[[torch.Tensor], torch.Tensor]


class OwnMetrics:
    """The user's metrics (config group ``metrics``) on one worker, by name.

    Args:
        nodes: name -> node with ``_target_``.
        device: where outputs are; metrics that have ``to`` are moved there, others get tensors on the CPU.
        scores: makes predictions of outputs, see ``Task.scores``.
    """

    def __init__(
        self,
        nodes: Mapping[str, Mapping[str, Any]],
        device: torch.device | str = "cpu",
        scores: Scores = lambda outputs: outputs,
    ) -> None:
        self.scores = scores
        self.names = {name: f"metrics.{name} ({node['_target_']})" for name, node in nodes.items()}
        self.made = {name: _made(name, node) for name, node in nodes.items()}
        self.moved = {name: callable(getattr(metric, "to", None)) for name, metric in self.made.items()}
        for name, metric in self.made.items():
            if self.moved[name]:
                self.made[name] = metric.to(device)
        self.samples = 0

    def reset(self) -> None:
        """Forget all samples, before a validation."""
        self.samples = 0
        for name, metric in self.made.items():
            for part in modules(metric):
                for state, default in part._defaults.items():  # a list that was reduced to a tensor
                    if isinstance(default, list) and not isinstance(getattr(part, state), list):
                        setattr(part, state, [])
            self._call(name, metric.reset)

    def add(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch to each metric: outputs (N, C) or logits (N,), labels (N,)."""
        if not self.made or not len(labels):
            return
        self.samples += len(labels)
        likely = self.scores(wide(outputs))
        on_cpu = (likely, labels) if all(self.moved.values()) else (likely.cpu(), labels.cpu())  # which waits for a GPU
        for name, metric in self.made.items():
            self._call(name, metric.update, *((likely, labels) if self.moved[name] else on_cpu))

    def gathered(self, total: Total, index: int, count: int) -> list[bytes]:
        """Collective call (if there are metrics): gather their states from all workers with samples, in order."""
        if not self.made or count == 1:
            return []
        from safetensors.torch import save

        own = save(dict(self._states())) if self.samples else b""
        return [part for part in exchanged(total, index, count, own) if part]

    def values(self, parts: Sequence[bytes]) -> dict[str, float]:
        """Compute each metric over the samples behind these states; if there are none, over this worker's own."""
        if not self.made or not (self.samples or parts):
            return {}
        if parts:
            from safetensors.torch import load

            self._take([load(part) for part in parts])
        return {name: self._value(name, self._call(name, metric.compute)) for name, metric in self.made.items()}

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, metric in self.made.items():
            for path, state in states(metric):
                for number, tensor in enumerate(state):
                    yield f"{name}|{path}|{number}", tensor.detach().cpu().clone().contiguous()

    def _take(self, parts: list[dict[str, torch.Tensor]]) -> None:
        for name, metric in self.made.items():
            found: list[dict[str, list[torch.Tensor]]] = []
            for part in parts:
                own: dict[str, list[torch.Tensor]] = {}
                for key in sorted(
                    (k for k in part if k.partition("|")[0] == name), key=lambda k: int(k.rpartition("|")[2])
                ):
                    own.setdefault(key.split("|")[1], []).append(part[key])
                found.append(own)
            _merge(metric, found)

    def _value(self, name: str, value: Any) -> float:
        try:
            return _number(value)
        except ValueError as error:
            raise RunFailed(f"{self.names[name]}: compute() {error}") from error

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RunFailed:
            raise
        except Exception as error:
            raise failed(self.names[name], method.__name__, method, error) from error


def wide(outputs: torch.Tensor) -> torch.Tensor:
    """Outputs without their graph, in float32 or 64."""
    found = outputs.detach()
    return found if found.dtype in (torch.float32, torch.float64) else found.float()


def _made(name: str, node: Mapping[str, Any]) -> Any:
    """Instantiate a user's metric from its config node, and check its interface.

    Raises:
        UserError: it cannot be made, lacks a method, or does not say how the workers' parts are put together.
    """
    metric = call_target(node, f"metrics.{name}")
    what = f"metrics.{name} ({node['_target_']})"
    if lacking := [method for method in METHODS if not callable(getattr(metric, method, None))]:
        raise UserError(
            what, f"has no method {lacking[0]}(); a metric has update(preds, target), compute() and reset()"
        )
    parts = list(modules(metric))
    for part in parts:  # they would meet in torch's default process group, which not every strategy has
        part.sync_on_compute = part._to_sync = False
    sums = getattr(metric, "sums", None)
    if not parts and (isinstance(sums, str) or not isinstance(sums, Sequence)):
        raise UserError(
            what,
            "does not say how the workers' parts are put together",
            "a subclass of torchmetrics.Metric, or sums = ('hits', 'samples'), the names of its attributes that add up",
        )
    if not parts and (missing := [s for s in sums or () if not hasattr(metric, s)]):
        raise UserError(what, f"has no attribute {missing[0]!r}, which its sums name")
    return metric


def try_out(name: str, node: Mapping[str, Any], scores: torch.Tensor, labels: torch.Tensor) -> bool | None:
    """Make a user's metric and try it on a batch; returns its ``higher_is_better``, or None if it has none.

    Args:
        scores, labels: of a few samples, see ``Task.scores``.

    Raises:
        UserError: it cannot be used.
    """
    metric, what = _made(name, node), f"metrics.{name} ({node['_target_']})"
    shape, of_labels = (f"({', '.join(['N', *map(str, t.shape[1:])])})" for t in (scores, labels))
    shape, of_labels = (text.replace("(N)", "(N,)") for text in (shape, of_labels))
    try:
        metric.update(scores, labels)
        value = metric.compute()
    except Exception as error:
        raise UserError(
            what, f"does not take predictions {shape} and labels {of_labels}: {first_line(error)}"
        ) from error
    try:
        _number(value)
    except ValueError as error:
        raise UserError(what, f"compute() {error}") from error
    direction = getattr(metric, "higher_is_better", None)
    return direction if isinstance(direction, bool) else None


def _number(value: Any) -> float:
    """Convert a metric's computed value to a float.

    Raises:
        ValueError: it is not a single one.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.size != 1 if isinstance(value, np.ndarray) else value.numel() != 1:
            raise ValueError(f"gives {tuple(value.shape)} values instead of one; choose an average")
        return float(value.item())
    if not isinstance(value, numbers.Real):
        raise ValueError(f"gives a {type(value).__name__} instead of a number; give each value a metric of its own")
    return float(value)


def modules(metric: Any) -> Iterator[Any]:
    """Yield the torchmetrics metrics in a user's metric: itself, and those that a wrapper holds."""
    if isinstance(metric, torch.nn.Module):
        yield from (module for module in metric.modules() if hasattr(module, "_reductions"))


def states(metric: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the states of a user's torchmetrics metric by name, each as a list of tensors."""
    parts = list(modules(metric))
    for place, part in enumerate(parts):
        for name, reduction in part._reductions.items():
            value = getattr(part, name)
            if not isinstance(value, list):
                yield f"{place}.{name}", [value]
            elif value and _joins(reduction):
                yield f"{place}.{name}", [torch.cat([torch.atleast_1d(v) for v in value])]
            else:
                yield f"{place}.{name}", value
    for name in () if parts else metric.sums:
        yield name, [_tensor(getattr(metric, name))]


def _merge(metric: Any, found: list[dict[str, list[torch.Tensor]]]) -> None:
    """Set a user's torchmetrics metric to the states of all workers, joined by its own reduction for each state."""
    parts = list(modules(metric))
    for place, part in enumerate(parts):
        for name, reduction in part._reductions.items():
            all_of_them = [states_of_one.get(f"{place}.{name}", []) for states_of_one in found]
            several = isinstance(part._defaults[name], list)
            flat = [tensor.to(part.device) for states_of_one in all_of_them for tensor in states_of_one]
            value: Any = flat if several else flat[0] if len(flat) == 1 else torch.stack(flat)
            if (
                reduction is not None and len(flat) > 1 and not (several and _joins(reduction))
            ):  # compute() takes the list
                value = reduction(value)
            setattr(part, name, value)
        part._computed, part._update_count = None, max(1, part._update_count)
    for name in () if parts else metric.sums:
        before = getattr(metric, name)
        together = torch.stack([states_of_one[name][0] for states_of_one in found]).sum(0)
        setattr(metric, name, _like(before, together))


def _joins(reduction: Any) -> bool:
    """Whether it is torchmetrics' ``dist_reduce_fx="cat"``."""
    return getattr(reduction, "__name__", "") == "dim_zero_cat"


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(np.asarray(value))  # Python's float becomes float64, its int int64


def _like(before: Any, value: torch.Tensor) -> Any:
    """The value in the type that the attribute had."""
    if isinstance(before, torch.Tensor):
        return value.to(before.device)
    return value.numpy() if isinstance(before, np.ndarray) else value.item()
