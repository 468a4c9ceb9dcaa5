"""The loss of a run, and the denominator of its mean: a batch's samples, or the sum of their class weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.instantiate import call_target
from trainer.errors import UserError

BALANCED = "balanced"
SAMPLES, WEIGHTS, OWN = "samples", "class weights", "its method denominator"
"""What the loss of a batch is divided by, so that it is a mean over batches, too."""
SUM, NEITHER, RANDOM = "sum", "neither", "random"
"""The loss of a batch is the sum of its parts' losses; does not follow from them; differs from call to call."""
LONGEST = 80
"""Characters of a list of weights that is proposed."""
CLASSES = 32
"""Classes of a batch that is compared with its parts, at most."""
TRIED = 8192
"""Most classes that are tried; of more, every second, third, ..., because the time is quadratic in them."""
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}

Denominator = Callable[[torch.Tensor], float]


class Criterion(nn.Module):
    """The loss of a run, with what a batch's loss is divided by.

    A batch without a denominator (all its labels are ignored, or have weight 0) has loss 0, where torch's is 0/0.
    Validations measure the loss without ``label_smoothing``, as people compare it. Outputs in 16 bits are widened to
    32.

    Args:
        loss: called with (outputs, labels), returns one number for the batch.
        denominator: of a batch's labels, which are on the CPU; None: the number of samples.

    Attributes:
        counted: (N,) what each sample's loss is multiplied by in a captured update; None: the mean over all counts.
    """

    def __init__(self, loss: nn.Module, denominator: Denominator | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.measured = _without_smoothing(loss)
        self.denominator = denominator
        self.counted: torch.Tensor | None = None

    def forward(
        self, outputs: torch.Tensor, labels: torch.Tensor, denominator: float = 1.0, train: bool = True
    ) -> torch.Tensor:
        if not denominator:
            return outputs.sum() * 0.0  # with a gradient, which other workers wait for
        if outputs.dtype in (torch.bfloat16, torch.float16):  # autocast leaves sigmoid and softmax in 16 bits
            outputs = outputs.float()
        if train and self.counted is not None:
            values: torch.Tensor = by_sample(self.loss)(outputs, labels)
            return (values.flatten(1).mean(1) if values.dim() > 1 else values).mul(self.counted.to(values.dtype)).sum()
        value: torch.Tensor = (self.loss if train else self.measured)(outputs, labels)
        return value


def make_criterion(
    node: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: str, device: torch.device, dtype: torch.dtype
) -> Criterion:
    """Make the criterion of a worker from the ``loss`` node of the config.

    Args:
        weights: of :func:`weights_of`. kind: what :func:`kind_of` found before the run.
        dtype: of the model's outputs. Losses in 16 bits are computed in 32.
    """
    tensors = {name: value.to(device, dtype) for name, value in weights.items()}
    loss = call_target({**node, **tensors}, "loss", kind=nn.Module)
    denominator = denominator_of(copy.deepcopy(loss).cpu(), kind)
    return Criterion(loss.to(device, dtype if dtype is torch.float64 else None), denominator)


def weights_of(node: Mapping[str, Any], classes: int, labels: Any) -> dict[str, torch.Tensor]:
    """Return ``loss.weight`` (C,) and ``loss.pos_weight`` () as tensors, where the config has them as numbers or
    balanced.

    Args:
        labels: (N,) of the training data; None: they are not known.

    Raises:
        UserError: weights are to be balanced, and a class has no sample, or the labels are not known.
    """
    found = {}
    for name in ("weight", "pos_weight"):
        value = node.get(name)
        if value == BALANCED:
            counts = _counts(labels, classes, f"loss.{name}={value}")
            found[name] = counts[0] / counts[1] if name == "pos_weight" else counts.sum() / (len(counts) * counts)
        elif isinstance(value, (list, tuple)) or (name == "pos_weight" and isinstance(value, (int, float))):
            found[name] = torch.tensor(value, dtype=torch.float64)
    return found


def _counts(labels: Any, classes: int, what: str) -> torch.Tensor:
    """The training samples of each class, (C,).

    Raises:
        UserError: they are not known, or a class has none.
    """
    numbers = "2.0" if "pos_weight" in what else f"[{','.join(['1.0'] * max(2, classes))}]"
    instead = f"{what.partition('=')[0]}={numbers if len(numbers) < LONGEST else '[...]'} with your own numbers"
    if labels is None:
        raise UserError(
            what, "the training data have no labels to count (an attribute 'labels' or 'targets', (N,))", instead
        )
    found = torch.as_tensor(labels).long().flatten()
    found = found[found >= 0]  # negative ones are ignored by losses
    counts = torch.bincount(found, minlength=max(2, classes)).double()
    if empty := (counts == 0).nonzero().flatten().tolist():
        which = f"class {empty[0]} has" if len(empty) == 1 else f"{len(empty)} classes, the first is {empty[0]}, have"
        raise UserError(what, f"{which} no sample in the training data, so that no weight follows", instead)
    return counts


def stand_in(node: Mapping[str, Any], classes: int) -> nn.Module:
    """Make the loss of the config before the training data can be read: balanced weights are any that are unequal.

    Raises:
        UserError: it cannot be made.
    """
    each = torch.arange(max(2, classes))
    weights = weights_of(node, classes, each.repeat_interleave(1 + each % 7))
    loss: nn.Module = call_target({**node, **{k: v.float() for k, v in weights.items()}}, "loss", kind=nn.Module)
    return loss


def labels_of(dataset: Any) -> Any:
    """The labels (N,) of a data set that holds them, its own or one of torch's or torchvision's; None: it does not say.

    Names of classes, shares of classes and whatever else is no class number for each sample count as not known.
    """
    for name in ("labels", "targets"):
        if (found := _class_numbers(getattr(dataset, name, None), dataset)) is not None:
            return found
    if isinstance(tensors := getattr(dataset, "tensors", None), tuple) and len(tensors) > 1:
        return _class_numbers(tensors[1], dataset)
    if isinstance(dataset, torch.utils.data.Subset) and (found := labels_of(dataset.dataset)) is not None:
        return found[torch.as_tensor(dataset.indices)]
    return None


def _class_numbers(found: Any, dataset: Any) -> torch.Tensor | None:
    """The labels that a data set holds, as a tensor (N,) of whole numbers; None: they are something else."""
    try:
        if not isinstance(found, torch.Tensor):
            array = np.asarray(found)
            found = torch.from_numpy(array if array.flags.writeable else array.copy())
        if found.dim() != 1 or len(found) != len(dataset) or found.is_complex():
            return None
        whole = found.long()
        return None if found.is_floating_point() and not torch.equal(whole.to(found.dtype), found) else whole
    except (TypeError, ValueError, RuntimeError):  # names, dicts, a list of lists; a stream has no length
        return None


def denominator_of(loss: nn.Module, kind: str) -> Denominator | None:
    """Return what maps a batch's labels to the denominator of a loss of this kind; None: their number does.

    Args:
        loss: on the CPU, where labels are before they are moved: nobody waits for a GPU.
    """
    if kind == OWN:
        return lambda labels: float(loss.denominator(labels))  # type: ignore[operator]
    if kind != WEIGHTS:
        return None
    weight, ignored = _weight(loss), getattr(loss, "ignore_index", -1)

    def denominator(labels: torch.Tensor) -> float:
        if labels.dim() > 1:  # shares of classes: torch divides by samples
            return float(len(labels))
        counted = labels[labels != ignored]
        return float(len(counted) if weight is None else weight[counted.long()].double().sum())

    return denominator


def kind_of(loss: nn.Module, classes: int, outputs: int | None, forms: Sequence[str]) -> str:
    """Find what the loss of a batch is divided by, by comparing batches with their two parts, which are unequal.

    Args:
        outputs: scores of a sample; None: one logit (N,).
        forms: of the labels that the loss will get: ``numbers``, ``shares``.

    Returns:
        SAMPLES, WEIGHTS or OWN, by which parts add up exactly; else SUM, NEITHER or RANDOM.
    """
    return kind_among(loss, [batch for form in forms for batch in _batches(loss, classes, outputs, form)])


def kind_among(
    loss: nn.Module, batches: Sequence[Sequence[torch.Tensor]], call: Callable[..., torch.Tensor] | None = None
) -> str:
    """Find what the loss of a batch is divided by, from batches (outputs, labels) of at least 6 samples with unlike
    thirds.

    Args:
        call: computes the loss of outputs and labels; None: the loss itself does.
    """
    trials = [_values(call or loss, batch) for batch in batches]
    if any(trial is None for trial in trials):
        return NEITHER
    if not all(torch.allclose(once, again, **TOLERANCE) for once, again, *_ in trials):  # type: ignore[misc, arg-type]
        return RANDOM
    candidates = [OWN] if callable(getattr(loss, "denominator", None)) else [SAMPLES, WEIGHTS]
    for kind in candidates:
        if all(_is_mean(trial, denominator_of(loss, kind) or _samples) for trial in trials):
            return kind
    return SUM if all(torch.allclose(t[0], t[2] + t[3], **TOLERANCE) for t in trials) else NEITHER  # type: ignore[index, arg-type]


def _samples(labels: torch.Tensor) -> float:
    return float(len(labels))


def _is_mean(trial: Any, denominator: Denominator) -> bool:
    whole, _, first, second, labels, cut = trial
    try:
        first_share, second_share = denominator(labels[:cut]), denominator(labels[cut:])
    except Exception:  # a method or an attribute of the user's that is something else
        return False
    together = first * first_share + second * second_share
    return torch.allclose(whole * (first_share + second_share), together, **TOLERANCE)  # type: ignore[arg-type]


@torch.no_grad()
def _values(loss: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> Any:
    """The loss of a batch, again, of its first third and of the rest, its labels, and where it is cut.
    None: not all are finite numbers."""
    outputs, labels = batch
    cut = len(labels) // 3
    try:
        values = [
            loss(outputs[part], labels[part]).double()
            for part in (slice(None), slice(None), slice(cut), slice(cut, None))
        ]
    except Exception:  # it takes no batches of these sizes
        return None
    usable = all(value.dim() == 0 and value.isfinite() for value in values)
    return (*values, labels, cut) if usable else None


def _batches(
    loss: nn.Module, classes: int, outputs: int | None, form: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches to try, (outputs, labels), which together hold all classes. Outputs are probabilities, which losses
    of logits also take. The parts of a batch hold classes in other proportions and with other weights; each part has a
    label that counts."""
    draw = torch.Generator().manual_seed(0)
    if outputs is None:
        for ones in (2, 7):
            labels = (torch.arange(12) < ones).float()
            yield torch.rand(12, generator=draw) * 0.8 + 0.1, labels
        return
    weight, ignored = _weight(loss), getattr(loss, "ignore_index", -1)
    order = (
        torch.arange(classes) if weight is None or len(weight) < classes else weight[:classes].argsort(descending=True)
    )
    kept = order[order != ignored]
    first, last = kept[:1], kept[-1:]
    for some in kept[:: -(-classes // TRIED)].split(CLASSES):
        labels = torch.cat([first.repeat(4), last, some, order[order == ignored]])
        guesses = labels.clone()  # right in the first part, and often wrong in the rest: their losses differ
        guesses[len(labels) // 3 :: 2] = (guesses[len(labels) // 3 :: 2] + 1) % outputs
        scores = torch.rand(len(labels), outputs, generator=draw).add_(0.1)
        scores.mul_(0.1 / scores.sum(1, keepdim=True))[torch.arange(len(labels)), guesses] += 0.9
        if form == "shares":
            labels = nn.functional.one_hot(labels, outputs).float()
            labels = 0.7 * labels + 0.3 * labels.roll(1, 0)
        yield scores, labels


def _weight(loss: nn.Module) -> torch.Tensor | None:
    """The class weights of a loss, torch's or of one's own: its attribute ``weight``, (C,)."""
    found = getattr(loss, "weight", None)
    return found.detach() if isinstance(found, torch.Tensor) and found.dim() == 1 else None


def by_sample(loss: nn.Module) -> nn.Module:
    """The same loss with a value for each sample, (N,) or (N, ...): one with an attribute ``reduction``, as torch's."""
    each = copy.copy(loss)  # its buffers are the same
    each.reduction = "none"  # type: ignore[assignment]
    return each


def _without_smoothing(loss: nn.Module) -> nn.Module:
    """The same loss without label smoothing; the loss itself, where it has none, or one that cannot be set."""
    share = getattr(loss, "label_smoothing", 0.0)
    if not isinstance(share, (int, float)) or not share:
        return loss
    plain = copy.copy(loss)  # its buffers are the same
    try:
        plain.label_smoothing = 0.0  # type: ignore[assignment]
    except AttributeError:  # a property of the user's
        return loss
    return plain
