"""A loss or a gradient that is not finite: the step is left out and nothing else, or the report names where it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.saving import saver
from tests.worker.test_loop import Lines
from trainer.data.batch_reordering import Rewind, reordered
from trainer.data.feed import Batch
from trainer.errors import NotFinite
from trainer.metrics.classification import ClassObjective
from trainer.optim.averaged import AveragedWeights
from trainer.optim.updater import Updater
from trainer.strategies.single import Single
from trainer.worker.loop import fit
from trainer.worker.nonfinite import MOST_SKIPS, STEP_HOOKS, BatchLoss, Stop, check_parameters
from trainer.worker.training import LogWindow, Reporting, Schedule, Training, Watchers

BAD = 3
"""The update with a bad batch, from 0."""


class Net(nn.Module):
    """Two layers with batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


class Root(nn.Module):
    """The loss of numbers whose square root is finite, and whose gradient is not."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss + (outputs.sum() * 0).sqrt() if (labels == 2).all() else loss


class Batches:
    """The feed of these batches, all in one epoch."""

    waited, merge = 0.0, 1

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches = batches

    def updates(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        for inputs, labels in self.batches:
            yield len(labels), iter([Batch(inputs, labels, len(labels), update=len(labels))])

    def evaluation(self, index: int, count: int, split: str = "val") -> Iterator[Any]:
        return iter([])

    def numbers(self, epoch: int, batch: int) -> list[int]:
        return [10 * batch, 10 * batch + 1]

    def batch(self, epoch: int, batch: int) -> Batch:
        return next(list(self.updates(epoch))[batch][1])


def batches(count: int = 8, spoiled: float = float("nan")) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    made = [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(count)]
    made[BAD][0][2, 1] = spoiled
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def factor(step: int) -> float:
    return 1.0 / (1 + step)


def training(kind: str, data: list[Any], tmp_path: Path | None = None, loss: nn.Module | None = None) -> Training:
    torch.manual_seed(0)
    model, task = Net(), ClassObjective(loss or nn.CrossEntropyLoss(), 3)
    strategy = Single({}, SimpleNamespace(rank=0, size=1))  # type: ignore[arg-type]
    strategy.setup(model, lambda module: Updater(optimizer_of(module), factor))  # type: ignore[arg-type]
    return Training(
        model=model,
        forward=model,
        task=task,
        strategy=strategy,
        feed=Batches(data),
        autocast=nullcontext,
        lockstep=True,
        schedule=Schedule(1, len(data), 1, 0, None),
        watchers=Watchers(STEP_HOOKS[kind](), ema=AveragedWeights(model, 0.9)),
        reporting=Reporting(Lines(), LogWindow(task), run_dir=tmp_path),
    )  # type: ignore[arg-type]


def by_hand(
    data: list[tuple[torch.Tensor, torch.Tensor]], left_out: int
) -> tuple[Net, list[torch.Tensor], list[float]]:
    """The model, its average and the losses of a plain loop in which nothing is done at that update."""
    torch.manual_seed(0)
    model = Net()
    optimizer, losses = optimizer_of(model), []
    average = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    for step, (inputs, labels) in enumerate(data):
        if step == left_out:
            continue
        optimizer.param_groups[0]["lr"] = 0.1 * factor(step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for mean, live in zip(average, (*model.parameters(), *model.buffers()), strict=True):
            mean.copy_(mean.lerp(live.detach(), 0.1) if live.is_floating_point() else live)
    return model, average, losses


@pytest.mark.parametrize("loss", [None, Root()])
def test_skipped_update_changes_nothing_but_the_place_in_the_schedule(loss: nn.Module | None) -> None:
    data = batches(spoiled=float("nan") if loss is None else 0.5)
    if loss is not None:
        data[BAD][1].fill_(2)
    run = training("skip", copy.deepcopy(data), loss=loss)
    fit(run)
    model, average, losses = by_hand(data, BAD)
    assert run.progress.skipped == 1 and run.progress.step == 8
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=0, msg=name)
    for mine, truth in zip(run.watchers.ema.average, average, strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-7)
    told = [metrics["loss"] for _, _, _, metrics, _ in run.reporting.report.trained if metrics]  # type: ignore[attr-defined]
    assert told == pytest.approx(losses, abs=1e-7) and len(run.reporting.report.trained) == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", list(STEP_HOOKS))
def test_finite_run_is_the_same_to_the_last_bit(kind: str) -> None:
    data = batches(spoiled=0.25)
    run = training(kind, copy.deepcopy(data))
    fit(run)
    model, _, losses = by_hand(data, -1)
    assert all(torch.equal(run.model.state_dict()[name], value) for name, value in model.state_dict().items())
    assert [metrics["loss"] for _, _, _, metrics, _ in run.reporting.report.trained] == losses  # type: ignore[attr-defined]


def test_too_many_skips_in_a_row_end_the_run() -> None:
    data = batches(MOST_SKIPS + 5)
    for inputs, _ in data[2:]:
        inputs.fill_(float("inf"))
    run = training("skip", data)
    with pytest.raises(NotFinite, match=r"100 updates in a row were skipped .on_nonfinite=skip.. The loss is nan"):
        fit(run)
    assert run.progress.step == 2 + MOST_SKIPS


@pytest.mark.parametrize("kind", ["stop", "rewind"])
def test_report_names_batch_samples_layer_and_gradients(kind: str, tmp_path: Path) -> None:
    run = training(kind, batches(), tmp_path)

    def layer(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs / 0 if run.progress.step == BAD and run.model.training else outputs

    run.model.norm.register_forward_hook(layer)  # type: ignore[union-attr, operator]
    run.feed.batches[BAD][0].fill_(1.0)  # type: ignore[attr-defined]
    with pytest.raises(NotFinite, match=r"update 4 \(epoch 0, batch 3\)(?s:.*)report: .*nonfinite.json") as caught:
        fit(run)
    assert (caught.value.step, caught.value.epoch, caught.value.update) == (4, 0, 3)
    told = json.loads((tmp_path / "nonfinite.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (told["update"], told["epoch"], told["batches"], told["losses"]) == (4, 0, [3], ["nan"])
    assert told["samples"] == {"3": [30, 31]} and told["parameters_not_finite"] == []
    again = told["forward_again"]
    assert again["inputs_are_finite"] and (again["first_layer"], again["first_layer_class"]) == ("norm", "BatchNorm1d")
    assert again["gradient_norms"].keys() == {"first", "norm", "last"} and again["gradient_norms"]["last"] == "nan"
    assert all(torch.isfinite(p).all() for p in run.model.parameters()), "the step was not taken"


class Late(Stop):
    """As on a GPU, where reading a loss waits for it."""

    def read_waits(self, loss: torch.Tensor) -> bool:
        return True


def test_on_a_gpu_the_line_finds_the_first_bad_batch_which_is_read_again(tmp_path: Path) -> None:
    run = training("stop", batches(), tmp_path)
    run.watchers.step_hook, run.schedule = Late(), replace(run.schedule, log_every=4)
    asked: list[int] = []
    monitored = run.feed.batch
    run.feed.batch = lambda epoch, batch: asked.append(batch) or monitored(epoch, batch)  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match=r"The loss is nan at update 4 \(epoch 0, batch 3\)") as caught:
        fit(run)
    assert run.progress.step == 5, "the line comes with the fifth batch"
    assert (caught.value.step, caught.value.update) == (4, 3) and asked == [3]
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert (told["update"], told["samples"], told["losses"]) == (4, {"3": [30, 31]}, ["nan"])
    assert not told["forward_again"]["inputs_are_finite"] and told["forward_again"]["first_layer"] == "first"
    assert "first.weight" in told["parameters_not_finite"], "steps were taken meanwhile"


def test_gradient_that_spoils_the_parameters_is_traced_to_its_update(tmp_path: Path) -> None:
    data = batches(spoiled=0.5)
    data[BAD][1].fill_(2)
    run = training("stop", data, tmp_path, loss=Root())
    with pytest.raises(NotFinite, match="The loss is nan at update 5"):
        fit(run)
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert told["samples_of_the_update_before"] == {"3": [30, 31]} and told["parameters_not_finite"]


def test_no_checkpoint_is_made_of_parameters_that_are_not_finite(tmp_path: Path) -> None:
    run = training("rewind", batches(spoiled=0.5), tmp_path)
    check_parameters(run)
    run.model.last.weight.data[0, 0] = float("inf")  # type: ignore[union-attr, operator, index]
    with pytest.raises(NotFinite, match=r"not finite \(last.weight\), so no checkpoint is made of them") as told:
        check_parameters(run)
    assert "report:" not in str(told.value), "none was left"
    run.model.first.weight.data[0, 0] = float("nan")  # type: ignore[union-attr, operator, index]
    with pytest.raises(NotFinite, match=r"first.weight and 1 other\)"):
        check_parameters(run)
    with pytest.raises(NotFinite, match="no checkpoint is made of them"):
        saver(tmp_path / "checkpoints")._take(run, 0)
    assert not (tmp_path / "checkpoints").exists()


def test_report_is_there_although_the_model_breaks_in_it(tmp_path: Path) -> None:
    run = training("stop", batches(), tmp_path)
    count = iter(range(100))

    def once(module: nn.Module, inputs: Any) -> None:
        if next(count) > BAD:
            raise ValueError("not twice")

    run.model.register_forward_pre_hook(once)
    with pytest.raises(NotFinite, match="loss is nan at update 4"):
        fit(run)
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert told["forward_again"] == {"not_known": "ValueError: not twice"} and told["update"] == 4


def test_report_of_a_worker_whose_parameters_are_at_servers_has_the_samples_and_no_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training("stop", batches(), tmp_path)
    run.strategy.whole = nullcontext  # type: ignore[attr-defined]
    with pytest.raises(NotFinite):
        fit(run)
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert told["samples"] == {"3": [30, 31]}
    assert told["forward_again"] == {"not_known": "LookupError: parameters are in the servers"}


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("updates", [1, 2, 5, 8])
def test_turned_epoch_leaves_the_bad_update_out_and_repeats_no_order(merge: int, updates: int) -> None:
    cuts = [(update, part) for update in range(updates) for part in range(merge)] + [("short", 0)] * (merge - 1)
    for first in range(updates):
        for bad in range(first, updates):
            order = reordered(cuts, merge, 2, [Rewind(2, first, 2, bad)])
            assert len(order) == len(cuts) and order[: first * merge] == cuts[: first * merge]
            assert order[updates * merge :] == cuts[updates * merge :]
            done = [update for update, part in order[first * merge : updates * merge : merge]]
            if others := [*range(bad + 1, updates), *range(first, bad)]:
                assert done == [*others, others[0]], "those after it, those before it, and the first of these once more"
    assert reordered(cuts, merge, 1, [Rewind(2, 0, 2, 0)]) == cuts, "another epoch"


@pytest.mark.parametrize(
    ("epoch", "order"),
    [
        (0, [0, 1, 2, 3, 4, 5]),
        (1, [0, 1, 4, 5, 2, 3]),
        (2, [3, 4, 5, 0, 1, 2]),
        (3, [2, 3, 4, 5, 0, 2]),
        (4, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_all_from_the_checkpoint_to_a_bad_update_of_a_later_epoch_comes_in_another_order(
    epoch: int, order: list[int]
) -> None:
    """Of what lies between them the second half comes first; epochs before and after are as they were."""
    assert reordered(range(6), 1, epoch, [Rewind(1, 2, 3, 1)]) == order


@pytest.mark.parametrize("kind", ["skip", "rewind"])
def test_gradients_that_overflow_are_the_loss_scales_matter_and_a_loss_is_not(kind: str) -> None:
    run = training(kind, batches(spoiled=0.5))
    run.watchers.step_hook.losses = [BatchLoss(0, 0, 1, 0, torch.tensor(1.0))]  # type: ignore[attr-defined]
    for p in run.model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    assert run.watchers.step_hook.find_bad(run) == ("gradients", 0)  # type: ignore[attr-defined]
    run.strategy.updater.scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    assert run.watchers.step_hook.find_bad(run) == ("", 0)  # type: ignore[attr-defined]
    run.watchers.step_hook.losses = [BatchLoss(0, 0, 1, 0, torch.tensor(float("nan")))]  # type: ignore[attr-defined]
    assert run.watchers.step_hook.find_bad(run) == ("loss", 0)  # type: ignore[attr-defined]
