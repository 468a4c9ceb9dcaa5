"""``nonfinite.json``: reports the batch, samples, layer and gradient in which the first NaN or infinite value was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from trainer.data.feed import Batch
from trainer.errors import first_line
from trainer.models.sync_batch_norm import SyncBatchNorm
from trainer.run_folder.json_files import leave
from trainer.run_folder.reset_files import REPORT
from trainer.strategies.contract import FullModel
from trainer.worker.model import not_finite_parameters
from trainer.worker.training import Training


@dataclass(frozen=True)
class Finding:
    """Where a loss or gradient that is not finite was found: worker, update, batches.

    Attributes:
        worker: who found it.
        update: of the run, from 1; update_of_epoch: the same in its epoch, from 0.
        what: ``loss`` or ``gradients``.
        batches: their numbers in the epoch, from 0; losses: of them, on that worker.
    """

    on_nonfinite: str
    worker: int
    epoch: int
    update_of_epoch: int
    update: int
    what: str
    batches: list[int]
    losses: list[float]


def leave_report(run: Training, finding: Finding, batch: Batch | None) -> None:
    """Write the report about a loss that is not finite into the run's folder.
    An error in a part of the report is written there; it does not hide the run's own error.

    Args:
        batch: the first bad batch; None: it is read again.
    """
    run_dir = run.reporting.run_dir
    if run_dir is None:
        return
    report: dict[str, Any] = asdict(finding)
    parts: dict[str, Callable[[], Any]] = {
        "samples": lambda: {str(n): run.feed.numbers(finding.epoch, n) for n in finding.batches},
        "parameters_not_finite": lambda: not_finite_parameters(run.model),
        "samples_of_the_update_before": lambda: _before(run, finding),
        "forward_again": lambda: _again(run, batch or run.feed.batch(finding.epoch, finding.batches[0])),
    }
    for name, part in parts.items():
        try:
            report[name] = part()
        except Exception as error:  # of the user's model or data, in a run that has failed already
            report[name] = _unknown(error)
    with contextlib.suppress(OSError):
        leave(run_dir / REPORT, _plain(report))


def _unknown(error: Exception) -> dict[str, str]:
    """Report entry for a part that could not be found out: the error."""
    return {"not_known": f"{type(error).__name__}: {first_line(error)}"}


def _before(run: Training, finding: Finding) -> dict[str, list[int] | None]:
    """The samples of the update before, if that update has made the parameters not finite; else {}."""
    if not finding.update_of_epoch or not not_finite_parameters(run.model):
        return {}
    merge, update = run.feed.merge, finding.update_of_epoch - 1
    return {str(n): run.feed.numbers(finding.epoch, n) for n in range(update * merge, (update + 1) * merge)}


def _again(run: Training, batch: Batch) -> dict[str, Any]:
    """Run forward and backward of the bad batch again, on this worker alone; returns what was found, for the report.

    Raises:
        LookupError: the model is not whole in this worker.
    """
    if isinstance(run.strategy, FullModel):
        raise LookupError("parameters are in the servers")
    layers: list[tuple[str, str]] = []
    with _watched(run.model, layers), _alone(run.model), _eager(run), run.autocast():
        loss, _ = run.task.forward(run.model, batch.inputs, batch.labels, batch.denominator)
    name, kind = layers[0] if layers else (None, None)
    found = {
        "inputs_are_finite": _finite(batch.inputs),
        "first_layer": name,
        "first_layer_class": kind,
        "loss": float(loss.detach()),
    }
    try:
        return {**found, "gradient_norms": _gradient_norms(run.model, loss)}
    except Exception as error:  # there is not the memory, or no gradient
        return {**found, "gradient_norms": _unknown(error)}


def gives_bad_gradients(run: Training, batch: Batch) -> bool:
    """Whether a batch's own gradient is not finite when computed again; False if it is, or cannot be computed."""
    try:
        with _alone(run.model), _eager(run), run.autocast():
            loss, _ = run.task.forward(run.model, batch.inputs, batch.labels, batch.denominator)
        return not all(math.isfinite(norm) for norm in _gradient_norms(run.model, loss).values())
    except Exception:  # of the user's model, in a run that has failed already
        return False


def _gradient_norms(model: nn.Module, loss: torch.Tensor) -> dict[str, float]:
    """The L2 norm of the loss's gradient by layer.
    No ``.grad`` is set, because that would begin the exchange between workers."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    squares: dict[str, float] = {}
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            layer = name.rpartition(".")[0]
            squares[layer] = squares.get(layer, 0.0) + float(values.double().square().sum())
    return {layer: math.sqrt(square) for layer, square in squares.items()}


@contextlib.contextmanager
def _watched(model: nn.Module, layers: list[tuple[str, str]]) -> Iterator[None]:
    """Context manager: appends modules whose output is NaN or infinite to ``layers``, in order, with their class."""

    def hook(name: str) -> Any:
        def note_output(module: nn.Module, _: Any, outputs: Any) -> None:
            if not _finite(outputs):
                layers.append((name or "(the model)", type(module).__name__))

        return note_output

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Context manager: no batch norm of the model waits for other workers."""
    waiting = [m for m in model.modules() if isinstance(m, (nn.SyncBatchNorm, SyncBatchNorm)) and m.training]
    for module in waiting:
        module.eval()
    try:
        yield
    finally:
        for module in waiting:
            module.train()


def _eager(run: Training) -> Any:
    """Context manager: a compiled model runs eagerly, so that its layers can be watched."""
    stance: Any = torch.compiler.set_stance
    return stance("force_eager") if run.reporting.compiles else contextlib.nullcontext()


def _finite(values: Any) -> bool:
    """Whether all numbers in nested tensors are finite."""
    if isinstance(values, torch.Tensor):
        return not values.is_floating_point() or bool(torch.isfinite(values.detach()).all())
    if isinstance(values, dict):
        return all(_finite(value) for value in values.values())
    return all(_finite(value) for value in values) if isinstance(values, (list, tuple)) else True


def _plain(node: Any) -> Any:
    """Replace NaN and infinity in nested data by texts, because JSON has none."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node
