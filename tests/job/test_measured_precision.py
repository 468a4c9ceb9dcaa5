"""precision=auto: what is measured decides, is kept for the next run, and is left out where it cannot be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composed import ready
from trainer.errors import RunFailed
from trainer.host import hardware
from trainer.host.visible_gpus import Gpu
from trainer.job import measured_precision
from trainer.job.measured_precision import measured, remembered
from trainer.job.ready import Ready
from trainer.worker.precision_trial import rate

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
LONG = ("+recipe=resnet50_random", "data.batches=600")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU that is not there, and a cache of its own."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "gpus", lambda: (H100,))


def trial(speeds: dict[str, float] | Exception, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put these speeds in the place of a trial; returns the assignments that come."""
    came = []

    def start_here(assignment: Any, supervision: Any) -> dict[str, Any]:
        came.append(assignment)
        if isinstance(speeds, Exception):
            raise speeds
        return {"speeds": speeds}

    monkeypatch.setattr(measured_precision, "start_here", start_here)
    return came


def job(tmp_path: Path, *typed: str) -> Ready:
    return ready(*LONG, "tracking=none", *typed, run_dir=str(tmp_path / "run"))


def test_the_measured_precision_is_chosen_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came = trial({"fp32": 2950.0, "bf16": 4703.0, "fp16": 4710.0}, monkeypatch)
    before = job(tmp_path)
    assert before.plan.chosen.precision == "fp16", "by the rules"
    said: list[str] = []
    after = measured(before, said.append)
    assert after.plan.chosen.precision == "bf16" and not said, "0.1% are no reason for a loss scale"
    assert after.plan.remarks.why["precision"] == "measured here: fp16 4,710, bf16 4,703, fp32 2,950 samples/s"
    assert after.plan.changed(chosen={}, remarks={}).batches == before.plan.batches
    [assignment] = came
    assert [p.role for p in assignment.plan.topology.processes] == ["worker"]
    assert not (tmp_path / "run" / ".batch_size").exists()
    again = job(tmp_path)
    assert again.plan.chosen.precision == "bf16" and measured(again, said.append) is again and len(came) == 1
    assert job(tmp_path, "plan=true").plan.chosen.precision == "bf16"
    assert job(tmp_path, "data.batch_size=8").plan.chosen.precision == "fp16", "another batch is another measurement"
    assert measured(after, said.append).with_batch_size(16).plan.chosen.precision == "bf16", "of a search it is one"


@pytest.mark.parametrize(
    "typed",
    [
        ("data.batches=100",),
        ("precision=bf16",),
        ("launch.nnodes=2", "launch.nproc=1", "launch.master_addr=10.0.0.1", "plan=true"),
        ("device=cpu",),
    ],
    ids=["short", "typed", "several hosts", "no GPU"],
)
def test_nothing_is_measured_without_need(
    typed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = trial({"fp32": 1.0, "bf16": 9.0, "fp16": 10.0}, monkeypatch)
    one = job(tmp_path, *typed)
    assert measured(one, print) is one and not came


def test_a_trial_that_fails_leaves_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial(RunFailed("worker 0: CUDA error: out of memory\nat length"), monkeypatch)
    said: list[str] = []
    after = measured(job(tmp_path), said.append)
    assert after.plan.chosen.precision == "fp16" and "batch norm" in after.plan.remarks.why["precision"]
    assert said == ["precision=auto: fp16 by the rules, because a trial failed: worker 0: CUDA error: out of memory"]
    assert remembered(after) is after


def test_a_trial_measures_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the same code runs: fp32 and bf16 of a small network."""
    monkeypatch.setattr(measured_precision, "candidates", lambda case: ["fp32", "bf16"])
    one = ready(
        "+recipe=digits_lenet",
        "device=cpu",
        "execution.threads=1",
        "tracking=none",
        "epochs=20",
        run_dir=str(tmp_path / "run"),
    )
    speeds = measured(one, print).model.speeds
    assert set(speeds) == {"fp32", "bf16"} and all(speed > 0 for speed in speeds.values())


class Steps:
    """Steps that take a second each, on a GPU with room for so many samples."""

    def __init__(self, most: int) -> None:
        self.most, self.now, self.sizes = most, 0.0, list[int]()

    def __call__(self, samples: int) -> None:
        if samples > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.now += 1.0
        self.sizes.append(samples)


def test_a_rate_is_of_timed_steps_and_of_a_batch_that_fits() -> None:
    steps = Steps(100)
    assert rate(steps, 256, 7.0, lambda: None, lambda: steps.now) == 64.0
    assert steps.sizes == [64] * (2 + 8), "the first two are not timed"
    with pytest.raises(torch.OutOfMemoryError):
        rate(Steps(0), 4, 1.0, lambda: None)
