"""data.num_workers=auto, measured: more processes read where the loop waits while cores are idle, and the same samples
come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer
from tests import composed
from tests.strategies.tiny import Augmented
from trainer.config.schema import DataConfig
from trainer.data import auto_num_workers
from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.auto_num_workers import Growth, Host, growing_readers, readers_needed
from trainer.data.feed import Feed
from trainer.data.placement import Placement
from trainer.data.reader import Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.source import Splits
from trainer.job import closing
from trainer.job.result import Result
from trainer.tracking.client import Ended


class Told:
    """A host of which each look finds another second gone by and so many core-seconds more idle."""

    def __init__(self, idle: float) -> None:
        self.looks, self.idle_cores = 0, idle

    def seconds(self) -> float:
        self.looks += 1
        return 100.0 + self.looks

    def idle(self) -> tuple[float, ...]:
        return (7.0 + self.looks * self.idle_cores, 1e6 + 64 * self.looks)


def growing(idle: float, readers: int = 1, most: int = 8, sharing: int = 1, updates: int = 50) -> Growth:
    return Growth(readers, sharing, most, lambda n: 2, Told(idle), updates)


@pytest.mark.parametrize(
    ("readers", "waiting", "idle", "most", "expected"),
    [
        (1, 0.05, 8.0, 8, 1),
        (1, 0.06, 8.0, 8, 2),
        (1, 0.5, 0.25, 2, 2),
        (1, 0.5, 0.24, 2, 1),
        (1, 0.9, 8.0, 16, 9),
        (1, 0.9, 3.2, 16, 4),
        (2, 0.6, 8.0, 16, 5),
        (2, 1.0, 8.0, 4, 4),
        (6, 0.9, 8.0, 4, 6),
    ],
)
def test_as_many_read_as_the_loop_needs_and_idle_cores_allow(
    readers: int, waiting: float, idle: float, most: int, expected: int
) -> None:
    """One reader keeps a loop waiting half of its time: two readers feed it; nine tenths: ten, of which ceil leaves
    rounding."""
    assert readers_needed(readers, waiting, idle, most) in (
        expected,
        expected + (waiting == 0.9 and idle == 8.0 and most == 16),
    )


@given(
    readers=st.integers(1, 16),
    waiting=st.floats(0, 1),
    idle=st.floats(0, 128),
    most=st.integers(1, 128),
    other=st.floats(0, 1),
)
def test_there_are_never_fewer_readers_and_never_more_than_idle_cores(
    readers: int, waiting: float, idle: float, most: int, other: float
) -> None:
    found = readers_needed(readers, waiting, idle, most)
    assert readers <= found <= max(readers, most, readers) and found - readers <= idle + 0.75
    assert readers_needed(readers, min(waiting, other), idle, most) <= readers_needed(
        readers, max(waiting, other), idle, most
    )
    assert waiting > 0.05 or found == readers


def test_the_decision_is_made_once_from_the_second_to_the_fiftieth_update(capsys: pytest.CaptureFixture[str]) -> None:
    one = growing(idle=1.2)
    answers = [one.updated(waited=30.0 if n == 0 else 30.4) for n in range(120)]  # the start, 30 s, is not counted
    assert answers == [None] * 49 + [2] + [None] * 70
    assert one.epoch_over(99.0) is None and one.readers == 2
    told = (
        "the first 50 updates waited for data 40% of their time, and 1.2 cores of the host were idle: from then "
        "on 2 processes read, not 1"
    )
    assert one.said == told and capsys.readouterr().out == f"data.num_workers=auto: {told}\n"
    assert one.found() == {"chosen": {"num_workers": 2, "prefetch": 2}, "why": {"num_workers": told}}


def test_each_epoch_is_judged_and_that_no_more_would_help_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    one, answers = growing(idle=1.2, most=3, updates=5), []
    for epoch in range(5):
        one.epoch_begins()
        answers += [one.updated(waited=epoch + 0.5 * (n > 0)) for n in range(6)]
        assert one.epoch_over(99.0) is None
    assert [answer for answer in answers if answer is not None] == [2, 3]
    assert [answers.index(2), answers.index(3)] == [4, 10], "after five updates of the first and of the second epoch"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].endswith("from then on 3 processes read, not 2") and one.said in lines[1]


def test_a_loop_that_does_not_wait_says_nothing_and_one_without_idle_cores_says_so() -> None:
    quiet, busy, shared = growing(idle=2.0), growing(idle=0.2), growing(idle=0.6, sharing=3)
    for one, waits in ((quiet, 0.05), (busy, 0.5), (shared, 0.5)):
        assert [one.updated(waits * (n > 0)) for n in range(50)] == [None] * 50
    assert quiet.said == "" and quiet.found() == {}
    assert busy.said.endswith("50% of their time, and 0.2 cores of the host were idle: no more processes would help")
    assert shared.readers == 1 and shared.found()["chosen"] == {"num_workers": 1, "prefetch": 2}


def test_a_short_epoch_is_judged_at_its_end_and_a_very_short_one_with_the_next() -> None:
    one, short = growing(idle=4.0), growing(idle=4.0)
    assert [one.updated(0.6 * (n > 0)) for n in range(12)] == [None] * 12 and one.epoch_over(0.6) == 3
    assert [short.updated(0.6 * (n > 0)) for n in range(4)] == [None] * 4 and short.epoch_over(0.6) is None
    assert short.updated(0.6) is None and short.epoch_over(0.6) == 3


def test_only_auto_that_has_chosen_processes_grows() -> None:
    assert growing_readers(DataConfig(num_workers=1), 1, 4, 1) is None
    assert growing_readers(DataConfig(), 0, 0, 1) is None
    several, one = growing_readers(DataConfig(), 1, 4, 4), growing_readers(DataConfig(read="scatter"), 1, 4, 4)
    assert several is not None and one is not None and (several.sharing, one.sharing) == (4, 1)
    kept = growing_readers(DataConfig(num_workers=None, prefetch=7), 1, 7, 1)
    assert kept is not None and [several.prefetch(2), kept.prefetch(2)] == [2, 7]


def test_idle_cores_are_those_of_this_process_and_within_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [SimpleNamespace(idle=10.0 * n, iowait=1.0) for n in range(4)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(auto_num_workers.os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    monkeypatch.setattr(auto_num_workers, "CGROUP", tmp_path)
    assert Host().idle() == (42.0,)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 3000000\nuser_usec 1\n")
    assert Host().idle() == (42.0,)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert auto_num_workers._unused_quota(now=10.0) == (1.5 * 10 - 3.0,)
    assert len(Host().idle()) == 2


def batches(feed: Feed, epochs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for epoch in range(epochs):
        for _, update in feed.updates(epoch):
            for batch in update:
                yield batch.inputs, batch.labels


@pytest.mark.all
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_order_and_augmentation_are_the_same_and_the_processes_before_are_gone() -> None:
    data = Augmented(torch.randn(60, 1, 8, 8), torch.arange(60))
    splits = Splits(data, ArrayDataset(torch.zeros(8, 1, 8, 8), torch.arange(8)))

    def made(**options: Any) -> Feed:
        place = Placement(splits, torch.device("cpu"), torch.float32, False)
        return Feed(
            splits,
            DistributedBatchSampler(60, 4, seed=3),
            EvaluationSampler(8, 4),
            place,
            merge=2,
            **{"reading": Reading(3), **options},
        )

    alone, grown = made(), made(reading=Reading(3, 1, 4), growth=growing(idle=4.0, updates=3))
    counted = []
    before = set(psutil.Process().children())
    try:
        for number, (one, other) in enumerate(zip(batches(alone, 3), batches(Waiting(grown), 3), strict=True)):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]), f"batch {number}"
            counted.append(len(set(psutil.Process().children()) - before))
        assert number == 3 * 15 - 1
        whole = [1] * 6 + [3] * 15 + [7] * 15 + [8] * 9
        assert counted == whole, "of 15 batches an epoch, the first three updates had six; each epoch is judged"
        assert [labels.tolist() for _, labels in eval_batches(grown)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        grown.close()
    assert not set(psutil.Process().children()) - before


class Waiting:
    """A feed whose loop has waited 60% of the meter's second."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def updates(self, epoch: int, first: int = 0) -> Iterator[Any]:
        for number, update in enumerate(self.feed.updates(epoch, first)):
            yield update
            self.feed.waited = 0.0 if number == 0 else 0.6


def eval_batches(feed: Feed) -> Iterator[tuple[Any, torch.Tensor]]:
    return ((numbers, batch.labels) for numbers, batch in feed.evaluation(0, 1))


def test_a_run_says_it_and_leaves_it_in_its_result(
    warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_num_workers.hardware, "cores", lambda: 2)
    monkeypatch.setattr(auto_num_workers, "Host", lambda: Told(1.1))
    monkeypatch.setattr(Growth, "_decide", lambda self, waited, own=Growth._decide: own(self, self.before[1] + 0.5))
    flowers = """
        model=lenet model.in_channels=3 model.image_size=32 data=embedded_flowers data.image_size=32
        data.per_class=1 data.batch_size=4 epochs=2 limit_val_batches=1 limit_train_batches=20 tracking=none
        device=cpu execution.threads=1 execution.log_every=1
    """.split()
    losses = []
    for readers in ("auto", "1"):
        folder = tmp_path / readers
        result = trainer.run([*flowers, f"data.num_workers={readers}", f"hydra.run.dir={folder}"])
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses.append([line["metrics"]["train/loss"] for line in lines if "train/loss" in line["metrics"]])
        told = json.loads((folder / "result.json").read_text())
        assert told["chosen"] == result.chosen
        if readers == "auto":
            said = (
                "the first 20 updates waited for data 50% of their time, and 1.1 cores of the host were idle: "
                "from then on 2 processes read, not 1"
            )
            assert (result.chosen["num_workers"], result.why["num_workers"]) == (2, said)
            assert f"data.num_workers=auto: {said}" in capsys.readouterr().out
            assert said in (folder / "workerlog.0").read_text()
            assert json.loads((folder / "plan.json").read_text())["chosen"]["num_workers"] == 1
        else:
            assert result.chosen["num_workers"] == 1 and "num_workers" not in result.why
    assert len(losses[0]) == 40 and losses[0] == losses[1]


def test_mlflows_run_is_tagged(warm: None, tmp_path: Path) -> None:
    sent: list[dict[str, str]] = []

    def close(run_dir: Path, ended: str, tags: dict[str, str], patience: float) -> dict[str, Ended]:
        sent.append(tags)
        return {"mlflow": Ended("1")}

    ready = composed.ready("+recipe=digits_lenet", run_dir=str(tmp_path))
    for chosen in (asdict(replace(ready.plan.chosen, num_workers=3)), asdict(ready.plan.chosen), {}):
        result = Result("done", str(tmp_path), chosen=chosen, why={"num_workers": "it waited"})
        closing._close_tracking(result, tmp_path, ready, [], SimpleNamespace(close=close))
    assert [tags.get("trainer.num_workers") for tags in sent] == ["3: it waited", None, None]
