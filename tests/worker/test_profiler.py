"""profile=true: a valid trace with our marks, and parts that are the step's time, all of it and nothing twice."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import trainer
from tests.runs import mlflow_runs, read
from tests.runs import trainer as command
from tests.strategies.tiny import TinyImages
from trainer.data.source import Facts, Splits
from trainer.worker.profiler import PARTS, both, length, minus, parts, union

SLEEP_S = 0.02
NS = 1e-6
"""Of a millisecond: the beginnings and the lengths in a trace are rounded to it."""
SLOW = (
    "+recipe=digits_lenet",
    "data._target_=tests.worker.test_profiler.SlowImages",
    "data.num_classes=7",
    "model.image_size=8",
    "+data.train_samples=96",
    "+data.val_samples=24",
    "+data.augment=false",
    "data.batch_size=4",
    "max_steps=20",
    "execution.threads=1",
    "execution.val_every_steps=4",
    "device=cpu",
)
LOOKED_AT = ("profile=true", "execution.profile_after=5", "execution.profile_steps=4")


class SlowBatches(Dataset[Any]):
    """The same samples; each batch takes its time, and worker 1's eight times that."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Any) -> Any:
        time.sleep(8 * SLEEP_S if os.environ.get("RANK") == "1" else SLEEP_S)
        return self.dataset.batch(indices)


class SlowImages(TinyImages):
    """Tiny images for training that take at least ``SLEEP_S`` a batch."""

    def open(self, facts: Facts) -> Splits:
        splits = super().open(facts)
        return Splits(SlowBatches(splits.train), splits.val)


def event(name: str, start: float, end: float, category: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start}


STEP = [
    event("ProfilerStep#1", 0, 100_000),
    event("trainer/data", 0, 10_000),
    event("trainer/forward", 10_000, 30_000),
    event("aten::conv2d", 10_000, 29_000, "cpu_op"),
    event("trainer/backward", 30_000, 70_000),
    event("autograd::engine::evaluate_function: ConvolutionBackward0", 30_000, 55_000, "cpu_op"),
    event("aten::convolution_backward", 30_000, 50_000, "cpu_op"),
    event("gloo:all_reduce", 40_000, 58_000),
    event("gloo:all_reduce", 55_000, 65_000),
    event("c10d::allreduce_", 40_000, 60_000, "cpu_op"),
    event("trainer/optimizer", 70_000, 80_000),
    event("trainer/communication", 78_000, 84_000),
    {"ph": "i", "name": "a moment", "ts": 5_000},
]
"""100 ms: of the exchange the first 10 ms are covered by an operator, 15 in backward, 2 in optimizer, 4 in no part are
not."""


def milliseconds(events: list[dict[str, Any]]) -> dict[str, float]:
    return {name: part["ms"] for name, part in parts(events)["parts"].items()}


def test_parts_of_a_trace_by_hand() -> None:
    found = milliseconds(STEP)
    assert found == {"data": 10, "forward": 20, "backward": 25, "communication": 21, "optimizer": 8, "ours": 16}
    assert tuple(found) == PARTS
    assert parts(STEP)["step_ms"] == sum(found.values()) == 100


def test_steps_are_averaged_and_validation_between_them_does_not_count() -> None:
    events = [*STEP, event("ProfilerStep#2", 100_000, 200_000), event("trainer/evaluation", 120_000, 180_000)]
    found = parts(events)
    assert (found["steps"], found["step_ms"]) == (2, 70)
    assert milliseconds(events)["ours"] == (16 + 40) / 2
    assert milliseconds(events)["forward"] == 10


def test_on_a_gpu_exchange_counts_where_no_other_kernel_runs() -> None:
    marks = [e for e in STEP if e.get("cat") != "cpu_op" and not e["name"].startswith("gloo")]
    kernels = [event("ncclDevKernel_AllReduce", 35_000, 60_000, "kernel"), event("sgemm", 20_000, 50_000, "kernel")]
    found = milliseconds([*marks, *kernels, event("aten::mm", 50_000, 60_000, "cpu_op")])
    assert found["communication"] == 10 + 6 and found["backward"] == 30


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda s: (float(s[0]), float(s[0] + s[1]))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(spans, spans)
def test_intervals_are_sets_of_moments(some: list[Any], others: list[Any]) -> None:
    some, others = union(some), union(others)
    assert moments(minus(some, others)) == moments(some) - moments(others)
    assert moments(both(some, others)) == moments(some) & moments(others)
    for found in (some, minus(some, others), both(some, others)):
        assert length(found) == len(moments(found)), "nothing counts twice"


def events_of(folder: Path, worker: int = 0) -> list[dict[str, Any]]:
    with gzip.open(folder / f"trace.{worker}.json.gz", "rt") as file:
        return [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]


def durations(events: list[dict[str, Any]], name: str) -> list[float]:
    return [e["dur"] / 1e3 for e in events if e["name"].startswith(name)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which data are slow and validation comes in between, tracked by MLflow; its working directory."""
    folder = tmp_path_factory.mktemp("slow")
    done = command(*SLOW, *LOOKED_AT, "launch.nproc=1", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "screen.txt").write_text(done.stdout)
    return folder


@pytest.mark.all
def test_trace_holds_the_updates_asked_for_and_the_table_is_their_time(slow: Path) -> None:
    told, events = read(slow / "run" / "profile.0.json"), events_of(slow / "run")
    assert told["updates"] == [6, 9] and told["steps"] == len(durations(events, "ProfilerStep#")) == 4
    for mark in ("trainer/forward", "trainer/backward", "trainer/optimizer"):
        assert len(durations(events, mark)) == 4
    assert len(durations(events, "trainer/evaluation")) == 1
    validation = sum(durations(events, "trainer/evaluation"))
    whole = sum(durations(events, "ProfilerStep#")) - validation
    assert told["step_ms"] * 4 == pytest.approx(whole, rel=1e-6)
    assert sum(part["ms"] for part in told["parts"].values()) == pytest.approx(told["step_ms"], rel=1e-9)
    assert sum(part["percent"] for part in told["parts"].values()) == pytest.approx(100)
    assert told["parts"]["data"]["ms"] >= SLEEP_S * 1e3
    assert told["parts"]["communication"]["ms"] == 0.0
    for part, mark in (
        ("forward", "trainer/forward"),
        ("backward", "trainer/backward"),
        ("optimizer", "trainer/optimizer"),
    ):
        assert told["parts"][part]["ms"] * 4 == pytest.approx(sum(durations(events, mark)), rel=1e-6, abs=4 * NS)


def test_table_is_printed_and_files_go_to_mlflow(slow: Path) -> None:
    screen = (slow / "screen.txt").read_text()
    told = read(slow / "run" / "profile.0.json")
    assert f"profile of worker 0: updates 6 to 9, {told['step_ms']:.3f} ms each" in screen
    for name, part in told["parts"].items():
        assert f"  {name:<14}{part['ms']:>12.3f} ms{part['percent']:>8.1f} %" in screen
    assert "gpuGetDeviceCount" not in screen
    [run] = mlflow_runs(slow)
    kept = {path.name for path in Path(run.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert {"trace.0.json.gz", "profile.0.json"} <= kept


@pytest.mark.all
@pytest.mark.parametrize("strategy", ["collective", "pserver_sync"])
def test_each_worker_has_its_own_and_sees_its_exchange(warm: None, tmp_path: Path, strategy: str) -> None:
    trainer.run(
        [*SLOW, *LOOKED_AT, f"strategy={strategy}", "launch.nproc=2", "tracking=none", f"hydra.run.dir={tmp_path}"]
    )
    waits = "gloo:all_reduce" if strategy == "collective" else "trainer/communication"
    told_by = [read(tmp_path / f"profile.{worker}.json") for worker in range(2)]
    fast, slow = (told["parts"]["communication"]["ms"] for told in told_by)
    assert fast > slow, "the fast worker waits for the slow one"
    for worker, told in enumerate(told_by):
        assert told["worker"] == worker and told["updates"] == [6, 9]
        assert sum(part["ms"] for part in told["parts"].values()) == pytest.approx(told["step_ms"], rel=1e-9)
        assert f"profile of worker {worker}: " in (tmp_path / f"workerlog.{worker}").read_text()
    for worker in range(2 if strategy == "collective" else 1):  # servers may have answered the slow one before it looks
        assert durations(events_of(tmp_path, worker), waits)


def test_short_runs_are_traced_to_their_end_and_the_next_run_leaves_none(tmp_path: Path) -> None:
    here = (*SLOW, "launch.nproc=1", "tracking=none", f"hydra.run.dir={tmp_path}")
    with torch.random.fork_rng():
        seen = trainer.run([*here, "max_steps=3", "profile=true"])
        assert read(tmp_path / "profile.0.json")["updates"] == [2, 3]
        unseen = trainer.run([*here, "max_steps=3"])
    assert not [*tmp_path.glob("trace*"), *tmp_path.glob("profile*")]
    assert seen.metrics["val/loss"] == unseen.metrics["val/loss"], "looking changes no number"
