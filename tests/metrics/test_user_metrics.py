"""A user's metrics are exact over workers: put together they are what one object says of all samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as truth

from trainer.data.source import Facts
from trainer.errors import RunFailed, UserError
from trainer.metrics.best import Best, EarlyStop, falls
from trainer.metrics.exchange import exchanged
from trainer.metrics.user_metrics import OwnMetrics, try_out, wide
from trainer.tasks.binary import Binary
from trainer.tasks.classification import Classification

CLASSES = 5
TASK = Classification()
TRIAL = TASK.trial(Facts("x", "x", 9, 9, (1,), CLASSES), None)


class Meeting:
    """The sum of a strategy, for workers that are threads."""

    def __init__(self, count: int) -> None:
        self.places: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)

    def total(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def summed(values: torch.Tensor) -> torch.Tensor:
            self.places[index] = values
            self.barrier.wait(30)
            result = torch.stack(self.places).sum(0)
            self.barrier.wait(30)
            return result

        return summed


def together(count: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """What each of so many workers gives, side by side.

    Raises:
        BaseException: what the first worker that broke has raised; the others wait for it no longer.
    """
    meeting, errors = Meeting(count), []

    def one(index: int) -> Any:
        try:
            return work(index, meeting.total(index))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        given = [pool.submit(one, index) for index in range(count)]
    if errors:
        raise errors[0]
    return [one.result() for one in given]


def test_one_worker_that_breaks_ends_the_others_at_once() -> None:
    def work(index: int, total: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if index == 1:
            raise ValueError("broken on purpose")
        return total(torch.ones(1))

    with pytest.raises(ValueError, match="on purpose"):
        together(3, work)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_every_worker_gets_everybodys_bytes(brought: list[bytes]) -> None:
    brought.append(bytes(range(256)) * 3)
    found = together(len(brought), lambda index, total: exchanged(total, index, len(brought), brought[index]))
    assert all(one == brought for one in found)


class Sums:
    """Sums in each of the types that they may have."""

    sums = ("hits", "samples", "by_class", "squares")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits, self.samples = 0, 0.0
        self.by_class, self.squares = np.zeros(CLASSES), torch.zeros(CLASSES)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.hits += int((preds.argmax(1) == target).sum())
        self.samples += len(target)
        self.by_class += np.bincount(target.numpy(), minlength=CLASSES)
        self.squares += preds.square().sum(0)

    def compute(self) -> Any:
        assert (type(self.hits), type(self.samples), type(self.by_class), type(self.squares)) == (
            int,
            float,
            np.ndarray,
            torch.Tensor,
        )
        return self.hits / self.samples + self.by_class.max() + self.squares.sum()


TORCHMETRICS = "torchmetrics.classification.Multiclass"
NODES: dict[str, dict[str, Any]] = {
    "f1w": {"_target_": f"{TORCHMETRICS}F1Score", "num_classes": CLASSES, "average": "weighted"},
    "auroc": {"_target_": f"{TORCHMETRICS}AUROC", "num_classes": CLASSES, "thresholds": None},  # keeps every sample
    "ece": {"_target_": f"{TORCHMETRICS}CalibrationError", "num_classes": CLASSES, "n_bins": 7},
    "least": {"_target_": "tests.metrics.test_user_metrics.least"},
    "sums": {"_target_": "tests.metrics.test_user_metrics.Sums"},
}


def least() -> Any:
    """A metric within another: the smallest F1 of its states so far, whose own state is a minimum."""
    from torchmetrics import MinMetric

    class Least(MinMetric):
        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            super().update(preds.gather(1, target[:, None]))

    return Least()


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    scores = torch.randn((number, CLASSES), generator=generator)
    scores[torch.arange(number), labels] += 1.0
    return scores, labels


@pytest.mark.parametrize("shares", [[101], [51, 50], [3, 0, 97, 1], [0, 101]])
def test_values_are_those_of_all_samples_however_they_are_shared_out(shares: list[int]) -> None:
    scores, labels = samples(101)
    likely = scores.softmax(1).numpy()
    squares = (likely.astype(np.float64) ** 2).sum()
    expected = {
        "f1w": truth.f1_score(labels, likely.argmax(1), average="weighted"),
        "auroc": truth.roc_auc_score(
            labels,
            likely.astype(np.float64) / likely.sum(1, keepdims=True, dtype=np.float64),
            multi_class="ovr",
            average="macro",
        ),
        "ece": ece(likely, labels.numpy()),
        "least": likely[np.arange(101), labels].min(),
        "sums": (likely.argmax(1) == labels.numpy()).mean() + np.bincount(labels).max() + squares,
    }
    starts = np.cumsum([0, *shares])

    def work(index: int, total: Any) -> list[dict[str, float]]:
        own, found = OwnMetrics(NODES, scores=TASK.scores), []
        for batch in (7, 20):  # a second validation begins anew
            own.reset()
            for start in range(starts[index], starts[index + 1], batch):
                part = slice(start, min(start + batch, starts[index + 1]))
                own.add(scores[part], labels[part])
            found.append(own.values(own.gathered(total, index, len(shares))))
        return found

    for worker in together(len(shares), work):
        for values in worker:
            assert values == pytest.approx(expected, rel=2e-6)


def ece(likely: np.ndarray, labels: np.ndarray, bins: int = 7) -> float:
    """The expected calibration error by its definition (Naeini et al., 2015)."""
    confidence, right = likely.max(1), likely.argmax(1) == labels
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(right[place == b].sum() - confidence[place == b].sum()) for b in range(bins)]
    return float(sum(gaps) / len(labels))


def test_preds_are_probabilities_of_at_least_single_precision() -> None:
    scores, _ = samples(4)
    torch.testing.assert_close(TASK.scores(wide(scores.bfloat16())), scores.bfloat16().float().softmax(1))
    assert TASK.scores(wide(scores.double())).dtype == torch.float64
    torch.testing.assert_close(
        Binary().scores(torch.tensor([0.5, 0.7])), 1 / (1 + torch.exp(-torch.tensor([0.5, 0.7])))
    )


class NoSums(Sums):
    sums = None  # type: ignore[assignment]


class Missing(Sums):
    sums = ("hits", "nowhere")  # type: ignore[assignment]


class Right:
    """The share of right guesses."""

    sums = ("hits", "samples")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits, self.samples = 0, 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.hits += int((preds.argmax(1) == target).sum())
        self.samples += len(target)

    def compute(self) -> float:
        return self.hits / self.samples


class Several(Sums):
    def compute(self) -> Any:
        return {"one": 1.0, "two": 2.0}


class Falling(Sums):
    higher_is_better = False


class Breaks(Sums):
    def compute(self) -> Any:
        if self.samples > 2:
            raise ValueError("too many\nand more")
        return 1.0


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (
            {"_target_": f"{TORCHMETRICS}F1Score", "num_classes": 4},
            r"metrics\.m \(.*\): does not take predictions \(N, 5\) and labels \(N,\): ",
        ),
        (
            {"_target_": f"{TORCHMETRICS}F1Score", "num_classes": 5, "average": "none"},
            r"compute\(\) gives \(5,\) values instead of one; choose an average",
        ),
        ({"_target_": f"{TORCHMETRICS}F1Score"}, r"metrics\.m \(.*\): called with nothing it says: "),
        (
            {"_target_": "tests.metrics.test_user_metrics.Several"},
            r"compute\(\) gives a dict instead of a number; give each value a metric of its own",
        ),
        ({"_target_": "torch.nn.Identity"}, r"has no method update\(\)"),
        (
            {"_target_": "tests.metrics.test_user_metrics.NoSums"},
            (
                r"does not say how the workers' parts are put together\. Type instead: a subclass of "
                r"torchmetrics\.Metric, or sums = "
            ),
        ),
        ({"_target_": "tests.metrics.test_user_metrics.Missing"}, r"has no attribute 'nowhere', which its sums name"),
    ],
)
def test_what_cannot_be_measured_with_is_refused(node: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        try_out("m", node, *TRIAL)


def test_a_metric_that_breaks_ends_the_run_with_its_file_and_line() -> None:
    own = OwnMetrics({"b": {"_target_": "tests.metrics.test_user_metrics.Breaks"}})
    own.add(*samples(3))
    with pytest.raises(
        RunFailed,
        match=(
            r"metrics\.b \(tests.metrics.test_user_metrics.Breaks\) broke in compute, "
            r".*test_user_metrics\.py:\d+: ValueError: too many\nTraceback"
        ),
    ):
        own.values([])


def test_a_class_says_which_way_is_better() -> None:
    assert try_out("m", {"_target_": "tests.metrics.test_user_metrics.Falling"}, *TRIAL) is False
    assert try_out("m", NODES["ece"], *TRIAL) is False and try_out("m", NODES["f1w"], *TRIAL) is True
    assert try_out("m", NODES["sums"], *TRIAL) is None
    lower = {"val/ece": True, "val/odd_loss": False}
    assert falls("val/ece", lower) and not falls("val/odd_loss", lower) and falls("val/loss", lower)
    best = Best("val/ece", lower=lower)
    assert [best.improved(step, value) for step, value in enumerate((0.3, 0.4, 0.2))] == [True, False, True]
    stop = EarlyStop("val/ece", 1, 0.0, lower)
    assert stop.why(1, {"val/ece": 0.3}) == "" and "val/ece has not fallen" in stop.why(2, {"val/ece": 0.4})


def test_nothing_is_asked_of_anybody_where_there_are_no_metrics() -> None:
    own = OwnMetrics({})
    own.add(*samples(3))
    assert own.gathered(lambda values: pytest.fail("a meeting"), 0, 2) == [] and own.values([]) == {}
