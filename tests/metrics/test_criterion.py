"""A loss is a mean over samples, over weights of classes, or none: what is found decides what may be trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.metrics.criterion import (
    NEITHER,
    OWN,
    RANDOM,
    SAMPLES,
    SUM,
    WEIGHTS,
    Criterion,
    denominator_of,
    kind_of,
    labels_of,
    weights_of,
)
from trainer.models.log_loss import LogLoss
from trainer.models.squared_error import SquaredError

UNEQUAL = torch.tensor([1.0, 5.0, 0.2, 0.0])


class Own(nn.Module):
    """A loss of one's own, from a function of outputs and labels."""

    def __init__(self, function: Any, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function, self.weight = function, weight

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.function(outputs, labels)


class Important(Own):
    """A weighted mean whose weights have a name of their own."""

    def denominator(self, labels: torch.Tensor) -> float:
        return float(UNEQUAL[labels].sum())


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, UNEQUAL)


def focal(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def contrastive(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (nn.CrossEntropyLoss(), SAMPLES),
        (nn.CrossEntropyLoss(label_smoothing=0.1), SAMPLES),
        (nn.CrossEntropyLoss(torch.full((4,), 3.0)), SAMPLES),
        (nn.CrossEntropyLoss(UNEQUAL), WEIGHTS),
        (nn.CrossEntropyLoss(UNEQUAL + 0.1, label_smoothing=0.1, ignore_index=2), WEIGHTS),
        (nn.CrossEntropyLoss(ignore_index=2), WEIGHTS),
        (nn.NLLLoss(UNEQUAL), WEIGHTS),
        (nn.MultiMarginLoss(weight=UNEQUAL), SAMPLES),
        (nn.CrossEntropyLoss(reduction="sum"), SUM),
        (nn.CrossEntropyLoss(UNEQUAL, reduction="sum"), SUM),
        (Own(focal), SAMPLES),
        (Own(weighted, UNEQUAL), WEIGHTS),
        (Own(weighted), NEITHER),
        (Important(weighted), OWN),
        (Important(focal), NEITHER),
        (Own(contrastive), NEITHER),
        (Own(lambda o, y: F.cross_entropy(o + torch.rand_like(o), y)), RANDOM),
    ],
    ids=str,
)
def test_what_a_loss_is_divided_by_is_found(loss: nn.Module, kind: str) -> None:
    assert kind_of(loss, 4, 4, ["numbers"]) == kind


@pytest.mark.parametrize("classes", [100, 1000])
@pytest.mark.parametrize("hidden", [0, 50, 99])
def test_one_class_that_differs_is_found_among_many(classes: int, hidden: int) -> None:
    """A weight, or an ``ignore_index``, that only the code of the loss knows."""
    other = torch.ones(classes)
    other[hidden] = 2.0
    for loss in (
        Own(lambda o, y: F.cross_entropy(o, y, other)),
        Own(lambda o, y: F.cross_entropy(o, y, ignore_index=hidden)),
    ):
        assert kind_of(loss, classes, classes, ["numbers"]) == NEITHER
    assert kind_of(Own(focal), classes, classes, ["numbers"]) == SAMPLES
    assert kind_of(Own(lambda o, y: F.cross_entropy(o, y, other), other), classes, classes, ["numbers"]) == WEIGHTS


def test_shares_of_classes_are_divided_by_samples_and_binary_losses_are_means() -> None:
    assert kind_of(nn.CrossEntropyLoss(UNEQUAL), 4, 4, ["shares", "numbers"]) == WEIGHTS
    assert kind_of(nn.CrossEntropyLoss(UNEQUAL), 4, 4, ["shares"]) == SAMPLES
    assert kind_of(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0)), 2, None, ["numbers"]) == SAMPLES
    assert kind_of(nn.BCEWithLogitsLoss(reduction="sum"), 2, None, ["numbers"]) == SUM


def test_parts_times_their_denominators_make_the_whole_batch() -> None:
    loss = nn.CrossEntropyLoss(UNEQUAL.double(), label_smoothing=0.0, ignore_index=1)
    draw = torch.Generator().manual_seed(1)
    outputs, labels = torch.randn(50, 4, generator=draw, dtype=torch.float64), torch.randint(4, (50,), generator=draw)
    of = denominator_of(loss, WEIGHTS)
    assert of is not None
    pieces = [(outputs[cut], labels[cut]) for cut in (slice(0, 7), slice(7, 8), slice(8, 50))]
    parts = [float(Criterion(loss)(o, y, of(y))) * of(y) for o, y in pieces]
    assert sum(parts) / of(labels) == pytest.approx(float(loss(outputs, labels)), abs=1e-12)
    nothing = torch.tensor([1, 3])  # ignored, and of weight 0
    assert of(nothing) == 0.0 and float(Criterion(loss)(outputs[:2], nothing, 0.0)) == 0.0


def test_validations_measure_the_loss_without_smoothing_and_with_weights() -> None:
    criterion = Criterion(nn.CrossEntropyLoss(UNEQUAL, label_smoothing=0.3))
    outputs, labels = torch.eye(4)[:3] * 2, torch.tensor([0, 2, 1])
    smooth = F.cross_entropy(outputs, labels, UNEQUAL, label_smoothing=0.3)
    assert float(criterion(outputs, labels)) == pytest.approx(float(smooth))
    plain = F.cross_entropy(outputs, labels, UNEQUAL)
    assert float(criterion(outputs, labels, train=False)) == pytest.approx(float(plain)) != float(smooth)


@pytest.mark.parametrize("loss", [LogLoss(), SquaredError("class_number"), nn.BCEWithLogitsLoss()], ids=str)
def test_losses_of_outputs_in_16_bits_are_computed_in_32(loss: nn.Module) -> None:
    """bfloat16 has 8 bits: 1 - sigmoid(6) is 0.0025, and between 0.996 and 1 it has no number."""
    logits = torch.tensor([6.0, 7.0, -5.0, 0.5], dtype=torch.bfloat16)
    outputs = torch.stack([logits, logits.flip(0)], 1) if isinstance(loss, SquaredError) else logits
    labels = torch.tensor([257, 0, 1, 300]) if isinstance(loss, SquaredError) else torch.tensor([0.0, 1.0, 1.0, 0.0])
    truth = loss(outputs.double(), labels if isinstance(loss, SquaredError) else labels.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert float(Criterion(loss)(outputs, labels)) == pytest.approx(float(truth), rel=1e-5)


def test_smoothing_that_cannot_be_set_stays() -> None:
    class Fixed(nn.Module):
        label_smoothing = property(lambda self: 0.1)

    class Tensor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("label_smoothing", torch.tensor([0.1, 0.2]))

    for loss in (Fixed(), Tensor()):
        assert Criterion(loss).measured is loss


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert weights_of({"weight": "balanced"}, 3, labels)["weight"].tolist() == pytest.approx(wanted.tolist())
    assert weights_of({"pos_weight": "balanced"}, 2, torch.tensor([0, 0, 0, 1]))["pos_weight"].item() == 3.0
    with pytest.raises(UserError, match="class 3 has no sample"):
        weights_of({"weight": "balanced"}, 4, labels)
    with pytest.raises(UserError, match="no labels to count"):
        weights_of({"weight": "balanced"}, 4, None)


def test_labels_are_read_off_the_data_sets_of_torch() -> None:
    whole = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.tensor([3, 1, 2, 0]))
    assert labels_of(torch.utils.data.Subset(whole, [0, 2])).tolist() == [3, 2]
    assert labels_of(object()) is None


class Labelled(torch.utils.data.Dataset[Any]):
    def __init__(self, labels: Any, targets: Any = None) -> None:
        self.labels, self.targets = labels, targets

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "labels",
    [
        ["neg", "pos", "neg", "pos"],
        {"neg": 0, "pos": 1},
        [0, 1],
        np.zeros((4, 2)),
        [[0], [1, 2]],
        "abcd",
        [0.5] * 4,
        4,
        object(),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_what_is_no_class_number_of_each_sample_counts_as_not_known(labels: Any) -> None:
    assert labels_of(Labelled(labels)) is None
    assert labels_of(Labelled(labels, [3, 1, 2, 0])).tolist() == [3, 1, 2, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["float32", "uint16", "uint64", "int8"])
def test_labels_of_a_read_only_file_are_copied(kind: str) -> None:
    array = np.array([3, 1, 2, 0], dtype=kind)
    array.flags.writeable = False
    assert labels_of(Labelled(array)).tolist() == [3, 1, 2, 0]
