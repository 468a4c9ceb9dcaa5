"""The loop calls a strategy's verbs in the contract's order, meets only where it may, and ends when it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.data.feed import Batch
from trainer.errors import RunFailed
from trainer.host.pulse import Pulse
from trainer.metrics.best import Best, EarlyStop
from trainer.metrics.classification import ClassObjective
from trainer.optim.averaged import AveragedWeights
from trainer.strategies.contract import Strategy
from trainer.worker.loop import fit
from trainer.worker.nonfinite import Stop
from trainer.worker.training import LogWindow, Reporting, Schedule, Training, Watchers
from trainer.worker.validation import validate

CLASSES = 3


class Recording(Strategy):
    """Writes down what it is asked, and doubles sums as if there were a second worker with the same samples."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: list[float] = []

    def setup(self, model: nn.Module, make_updater: Any) -> nn.Module:
        raise AssertionError("a worker's matter, not the loop's")

    def weight(self, samples: int) -> float:
        self.calls.append(f"weight {samples:g}")
        return 2.0

    def prepare(self, batch: Any) -> None:
        self.calls.append("prepare")

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.calls.append("last" if last else "not last")
        yield
        self.calls.append("end")

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append("backward")
        self.weights.append(loss.item())

    def step(self, samples: int) -> None:
        self.calls.append(f"step {samples}")

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce_sum")
        return 2 * values

    def members(self) -> tuple[int, int]:
        return 0, 1

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    @property
    def lr(self) -> float:
        return 0.1 * (1 + sum(call.startswith("step") for call in self.calls))


class FakeFeed:
    """``groups``: samples of each batch of each update; an evaluation of two batches."""

    waited = 0.0

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups

    def updates(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        for group in self.groups:
            whole = sum(group)
            yield whole, (self.batch(n, n / whole, i == len(group) - 1, whole) for i, n in enumerate(group))

    def evaluation(self, index: int, count: int, split: str = "val") -> Iterator[tuple[np.ndarray, Batch]]:
        yield np.array([0, 1, 2]), self.batch(3)
        yield np.array([3]), self.batch(1)

    def batch(self, samples: int, share: float = 1.0, last: bool = True, whole: int = 0) -> Batch:
        return Batch(
            torch.eye(CLASSES)[torch.arange(samples) % CLASSES],
            torch.zeros(samples, dtype=torch.int64),
            samples,
            share,
            last,
            whole,
        )


class Lines:
    """A report that remembers."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, int, int, dict[str, float], float]] = []
        self.validated: list[tuple[int, int, dict[str, float]]] = []
        self.done: list[tuple[int, int]] = []
        self.samples = 0.0
        self.waited_for: list[str] = []
        self.run_dir: Path | None = Path("run")
        self.who = ""
        self.watched = Best("val/acc1")
        self.ended = ""
        self.pulse = Pulse("")

    def doing(self, what: str) -> None:
        self.waited_for.append(what)

    def progress(self, epoch: int, step: int) -> None:
        self.done.append((epoch, step))

    def training(
        self,
        epoch: int,
        batch: int,
        step: int,
        metrics: dict[str, float],
        samples: float,
        lr: float,
        feed: Any,
        gauges: dict[str, float],
        rest: bool = False,
    ) -> None:
        self.samples += samples
        self.trained.append((epoch, batch, step, dict(metrics), lr))

    def validation(self, epoch: int, step: int, values: dict[str, float]) -> bool:
        self.validated.append((epoch, step, {name.removeprefix("val/"): value for name, value in values.items()}))
        return len(self.validated) == 1

    def evaluating(self) -> Any:
        return nullcontext()

    def stopped(self, why: str) -> None:
        self.ended = why


class Watched(nn.Module):
    """Outputs its inputs; remembers in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[str] = []
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.modes.append(("train" if self.training else "eval") + (" grad" if torch.is_grad_enabled() else ""))
        return inputs * self.factor


def training(groups: list[list[int]], *, lockstep: bool = True, epochs: int = 1, **schedule: Any) -> Training:
    model, kept, task = Watched(), [], ClassObjective(nn.CrossEntropyLoss(), CLASSES)
    total = schedule.pop("total_steps", epochs * len(groups))
    run = Training(
        model=model,
        forward=model,
        task=task,
        strategy=Recording(),
        feed=FakeFeed(groups),
        autocast=nullcontext,
        lockstep=lockstep,
        schedule=Schedule(epochs, total, **{"log_every": 1, "val_every": 1, "val_every_steps": None, **schedule}),
        watchers=Watchers(Stop(), save_best=lambda first: kept.append(run.progress.step)),
        reporting=Reporting(Lines(), LogWindow(task)),
    )
    run.kept = kept
    return run


def test_verbs_come_in_the_contracts_order() -> None:
    run = training([[2, 4]], log_every=10)
    fit(run)
    assert run.strategy.calls == [
        "weight 6",
        "prepare",
        "not last",
        "backward",
        "end",
        "prepare",
        "last",
        "backward",
        "end",
        "step 6",
        "all_reduce_sum",
        "synchronize",
        "all_reduce_sum",
        "synchronize",
    ]
    plain = nn.functional.cross_entropy(torch.eye(3)[torch.arange(4) % 3], torch.zeros(4, dtype=torch.int64)).item()
    assert run.strategy.weights[1] == pytest.approx(plain * 2.0 * 4 / 6)


def test_workers_out_of_step_meet_only_to_evaluate() -> None:
    run = training([[2], [2]], lockstep=False, epochs=2)
    fit(run)
    assert run.strategy.calls.count("all_reduce_sum") == 3, "two evaluations, and the samples of all workers at the end"
    for before, call in zip(run.strategy.calls, run.strategy.calls[1:], strict=False):
        assert call != "all_reduce_sum" or before == "synchronize"


class Counting(Recording):
    """A strategy that knows more samples than its workers remember: one of them has died."""

    def samples_applied(self) -> int:
        return 99


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(("strategy", "samples"), [(Recording, 2 * 7), (Counting, 99)])
def test_samples_of_the_run_are_those_that_the_strategy_has_counted(
    lockstep: bool, strategy: type[Recording], samples: int
) -> None:
    """Where it counts none they are the sum over the workers, of which here are two."""
    run = training([[3], [4]], lockstep=lockstep)
    run.strategy = strategy()
    fit(run)
    assert run.reporting.report.samples == samples


def test_evaluation_is_of_the_settled_model_in_eval_mode_over_all_workers() -> None:
    run = training([[2], [2]], val_every_steps=1)
    metrics = fit(run)
    modes = run.model.modes
    assert modes == ["train grad", "eval", "eval", "train grad", "eval", "eval"]
    assert metrics["acc1"] == 2 / 4 and metrics["acc2"] == 1.0
    scores, zeros = torch.eye(3)[[0, 1, 2, 0]], torch.zeros(4, dtype=torch.int64)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(scores, zeros).item())
    assert run.model.training


def test_the_same_update_is_evaluated_once() -> None:
    run = training([[2], [2]], val_every_steps=2)
    fit(run)
    assert [(epoch, step) for epoch, step, _ in run.reporting.report.validated] == [(0, 2)]
    assert validate(run) == run.reporting.report.validated[-1][2]


@pytest.mark.parametrize(
    ("rhythm", "validated"),
    [
        ({"val_every": 1}, [2, 4, 6, 8]),
        ({"val_every": 3}, [6, 8]),
        ({"val_every": 0}, [8]),
        ({"val_every": 0, "val_every_steps": 3}, [3, 6, 8]),
        ({"val_every": 2, "total_steps": 5}, [4, 5]),
        ({"val_every": 0, "total_steps": 1}, [1]),
    ],
)
def test_validation_comes_when_it_is_due_and_at_the_end(rhythm: dict[str, int], validated: list[int]) -> None:
    run = training([[2], [2]], epochs=4, **rhythm)
    fit(run)
    assert [step for _, step, _ in run.reporting.report.validated] == validated
    assert run.progress.step == validated[-1] == len(run.reporting.report.done)
    assert run.strategy.calls[-1] == "synchronize"


def test_best_model_is_kept_while_it_is_settled() -> None:
    run = training([[2], [2]], epochs=2)
    fit(run)
    assert run.kept == [2]


def test_another_worker_than_the_first_keeps_no_best_model() -> None:
    run = training([[2], [2]], epochs=2)
    run.reporting.report.run_dir = None
    fit(run)
    assert run.kept == []


def test_a_line_averages_the_last_batches_whatever_their_epoch() -> None:
    run = training([[1], [2], [3], [3], [3], [3], [1]], log_every=5, epochs=3)
    fit(run)
    assert [(epoch, batch, step) for epoch, batch, step, _, _ in run.reporting.report.trained] == [
        (0, 0, 1),
        (0, 5, 6),
        (1, 3, 11),
        (2, 1, 16),
        (2, 6, 21),
    ]
    sizes = [1, 2, 3, 3, 3, 3, 1] * 3
    hits = [m["acc1"] for _, _, _, m, _ in run.reporting.report.trained]
    spans = [(0, 1), (1, 6), (6, 11), (11, 16), (16, 21)]
    assert hits == pytest.approx([len(sizes[a:b]) / sum(sizes[a:b]) for a, b in spans]), "a hit in each batch"
    rates = [lr for *_, lr in run.reporting.report.trained[:3]]
    assert rates == pytest.approx([0.1, 0.6, 1.1]), "of the update just done"
    assert run.reporting.report.samples == 2 * sum(sizes), "of both workers, each once"


def test_what_is_left_at_the_end_is_averaged_with_the_line_before() -> None:
    run = training([[1], [2], [3], [3]], log_every=3, epochs=2)
    fit(run)
    assert [(step, m["acc1"]) for _, _, step, m, _ in run.reporting.report.trained] == [
        (1, 1.0),
        (4, pytest.approx(3 / 8)),
        (7, pytest.approx(3 / 6)),
        (8, pytest.approx(4 / 9)),
    ]
    assert run.reporting.report.samples == 2 * 18


def test_merged_batches_are_counted_as_batches() -> None:
    run = training([[1, 1], [1, 1], [1, 1], [1]], log_every=4, epochs=2)
    fit(run)
    assert [(epoch, batch, step) for epoch, batch, step, _, _ in run.reporting.report.trained] == [
        (0, 1, 1),
        (0, 5, 3),
        (1, 3, 6),
        (1, 6, 8),
    ]


def test_placeholder_batch_takes_part_and_counts_nothing() -> None:
    run = training([[2], [0]])

    def updates(epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        yield 2, iter([FakeFeed.batch(run.feed, 2)])
        placeholder = FakeFeed.batch(run.feed, 1, 0.0)
        placeholder.samples = 0
        yield 0, iter([placeholder])

    run.feed.updates = updates
    fit(run)
    assert run.strategy.calls.count("backward") == 2 and "step 0" in run.strategy.calls
    assert run.strategy.weights[1] == 0.0
    assert [m for _, _, _, m, _ in run.reporting.report.trained][1] == {}


@pytest.mark.parametrize("lockstep", [True, False])
def test_loss_that_is_no_number_ends_the_run_and_says_what_helps(lockstep: bool) -> None:
    run = training([[2], [2], [2]], lockstep=lockstep, epochs=3)
    run.model.factor.data.fill_(torch.nan)
    with pytest.raises(RunFailed, match=r"(?s)loss is nan at update 1 \(epoch 0, batch 0\).*optimizer\.lr.*clip_norm"):
        fit(run)
    assert not run.reporting.report.trained, "the curves have no NaN"


def never_better(run: Training, patience: int) -> None:
    """The model learns nothing, so that no validation is better than the first."""
    run.watchers.early_stop = EarlyStop("val/acc1", patience, 0.0)


def test_early_stop_ends_the_run_after_its_patience_and_says_so() -> None:
    run = training([[2], [2]], epochs=9)
    never_better(run, 2)
    fit(run)
    assert [step for _, step, _ in run.reporting.report.validated] == [2, 4, 6] and run.progress.step == 6
    assert run.reporting.report.ended.startswith("early stop at update 6: val/acc1 has not risen for 2 validations")
    assert run.strategy.calls[-1] == "synchronize"


def test_early_stop_inside_an_epoch_ends_it_there() -> None:
    run = training([[2]] * 8, epochs=3, val_every_steps=3)
    never_better(run, 1)
    fit(run)
    assert run.progress.step == 6 and [step for _, step, _ in run.reporting.report.validated] == [3, 6]
    assert run.reporting.report.ended
    assert run.reporting.report.trained[-1][2] == 6, "the last update has its line"


def test_a_run_that_is_done_has_not_stopped_early() -> None:
    run = training([[2], [2]], epochs=2)
    never_better(run, 1)
    fit(run)
    assert run.progress.step == 4 and run.reporting.report.ended == ""


def test_all_workers_decide_by_the_first_ones_numbers() -> None:
    run = training([[2], [2]], epochs=3)
    never_better(run, 1)
    numbers: list[list[float]] = []

    def total(values: torch.Tensor) -> torch.Tensor:
        if len(values) == 4 and values[-1] <= 1:  # loss, acc1, acc2, f1; sums of training end with 2 samples
            numbers.append(values.tolist())
            return torch.tensor([0.0, 0.1 * len(numbers), 0.0, 0.0], dtype=torch.float64)
        return values

    run.strategy.all_reduce_sum = total
    run.strategy.members = lambda: (1, 2)
    fit(run)
    assert numbers == [[0.0] * 4] * 3, "a worker that is not the first brings zeros"
    assert run.progress.step == 6 and run.watchers.early_stop.best.value == pytest.approx(0.3)


def test_a_schedule_that_goes_by_validations_is_told_of_each() -> None:
    run, told = training([[2], [2]], epochs=2), []
    run.watchers.plateau = True
    run.strategy.observe = lambda step, metrics: told.append((step, dict(metrics)))
    run.strategy.all_reduce_sum = lambda values: values
    fit(run)
    assert [step for step, _ in told] == [2, 4]
    assert told[0][1].keys() == {"val/loss", "val/acc1", "val/acc2", "val/f1"}


def test_averaged_weights_follow_each_update_and_are_evaluated_beside_the_model() -> None:
    run = training([[2], [2]], epochs=2, val_every_steps=2)
    run.strategy.all_reduce_sum = lambda values: values
    update, steps = run.strategy.step, []

    def move(samples: int) -> None:
        update(samples)
        with torch.no_grad():
            run.model.factor += 1.0

    run.strategy.step = move
    run.watchers.ema = AveragedWeights(run.model, 0.5)
    follow = run.watchers.ema.follow
    run.watchers.ema.follow = lambda step: (steps.append(step), follow(step))[1]
    fit(run)
    assert sorted(set(steps)) == [0, 1, 2, 3, 4]
    average = 1.0
    for weights in (2.0, 3.0, 4.0, 5.0):
        average = 0.5 * average + 0.5 * weights
    scores, zeros = torch.eye(3)[[0, 1, 2, 0]], torch.zeros(4, dtype=torch.int64)
    last = run.reporting.report.validated[-1][2]
    assert last["loss"] == pytest.approx(nn.functional.cross_entropy(5 * scores, zeros).item())
    assert last["val_ema/loss"] == pytest.approx(nn.functional.cross_entropy(average * scores, zeros).item())
    assert run.model.factor.item() == 5.0


@pytest.mark.parametrize(("metric", "kept"), [("val_ema/acc1", 1.5), ("val/acc1", 2.0)])
def test_the_best_model_is_the_average_where_its_metric_marks_it(metric: str, kept: float) -> None:
    run, found = training([[2]]), []
    run.strategy.all_reduce_sum = lambda values: values
    run.strategy.step = lambda samples: run.model.factor.data.fill_(2.0)
    run.watchers.ema = AveragedWeights(run.model, 0.5)
    run.reporting.report.watched = Best(metric)
    run.watchers.save_best = lambda first: found.append(run.model.factor.item())
    fit(run)
    assert found == [kept]


def test_the_first_batch_whose_time_is_that_of_starting_has_no_rate(tmp_path: Path) -> None:
    from trainer.run_folder.report import Report

    run = training([[1], [2], [3]], log_every=2, epochs=2)
    run.reporting.report = Report(tmp_path, 6)
    fit(run)
    run.reporting.report.close()
    told = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = ["perf/samples_per_s" in metrics for metrics in told if "train/loss" in metrics]
    assert rates == [False, True, True, True], "after 1, 3, 5 updates and at the end"
    assert run.reporting.report.outcome()["samples"] == 2 * 12


@pytest.mark.parametrize("val_every_steps", [None, 5])
def test_lines_come_in_the_order_of_updates_whatever_ends_the_run(
    val_every_steps: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 4 is left when the run ends: by its last update, or by a validation, after which its line would come too
    late."""
    from trainer.run_folder.report import Report

    for early in (None, EarlyStop("val/loss", 1, 1e9)):
        run = training([[1]] * 5, log_every=3, epochs=2 if early else 1, val_every_steps=val_every_steps)
        if early:
            early.why(0, {"val/loss": 0.0})
        run.watchers.early_stop, run.reporting.report = early, Report(tmp_path, 10 if early else 5)
        fit(run)
        run.reporting.report.close()
        lines = [line.partition("]")[0] for line in capsys.readouterr().out.splitlines()]
        trained = [f"[Epoch 0, batch {n}" for n in ((0, 3) if early else (0, 3, 4))]
        assert lines[: len(trained)] == trained and lines[len(trained)] == "[Epoch 0"
        assert len(lines) == len(trained) + 1 + bool(early)
        steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert sorted(steps) == [1, 4, 5, 5], "the point is there"
