"""Whole runs, as users start them, against each other: the same numbers from any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import trainer
from trainer.job.result import Result

COMMON = ("tracking=none", "device=cpu", "execution.threads=1", "execution.log_every=1")
DIGITS = (
    "+recipe=digits_lenet",
    "precision=fp64",
    "max_steps=30",
    "data.global_batch_size=64",
    "sampler.drop_last=false",
    *COMMON,
)
"""23 updates an epoch of 1,438 samples: 22 of 64 and one of 30, which 4 workers share as 8, 8, 7 and 7."""
AUGMENTED = (
    "+recipe=digits_lenet",
    "data._target_=tests.strategies.tiny.TinyImages",
    "data.num_classes=7",
    "+data.train_samples=96",
    "+data.val_samples=24",
    "+data.augment=true",
    "data.global_batch_size=16",
    "epochs=2",
    *COMMON,
)
FLOWERS = (
    "model=lenet",
    "model.in_channels=3",
    "model.image_size=32",
    "data=embedded_flowers",
    "data.image_size=32",
    "data.per_class=1",
    "data.batch_size=8",
    "epochs=2",
    "limit_train_batches=2",
    "limit_val_batches=2",
    *COMMON,
)


@dataclass(frozen=True)
class Run:
    """What a run left."""

    result: Result
    weights: dict[str, np.ndarray]
    losses: list[float]


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def runs(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs by their overrides, each done once; ``again`` makes it another one."""

    @cache
    def run(*overrides: str, again: int = 0) -> Run:
        folder = tmp_path_factory.mktemp("run")
        result = trainer.run([*overrides, f"hydra.run.dir={folder}"])
        return Run(result, load_file(folder / "model.safetensors"), losses(folder))

    return run


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["train/loss"] for line in lines if "train/loss" in line["metrics"]]


def assert_equal(one: Run, other: Run, tolerance: float) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name in one.weights:
        np.testing.assert_allclose(one.weights[name], other.weights[name], rtol=0, atol=tolerance, err_msg=name)
    assert one.result.metrics["val/loss"] == pytest.approx(other.result.metrics["val/loss"], abs=tolerance)
    for name in ("val/acc1", "val/acc5"):
        assert one.result.metrics[name] == other.result.metrics[name]


@pytest.mark.parametrize(
    "overrides",
    [
        ("launch.nproc=2",),
        ("launch.nproc=4",),
        ("launch.nproc=1", "strategy=collective"),
        ("launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=1"),
        ("launch.nproc=2", "strategy.bucket_cap_mb=0.01", "strategy=collective"),
    ],
    ids=" ".join,
)
def test_any_number_of_processes_equals_one_on_the_same_global_batch(runs: Runs, overrides: tuple[str, ...]) -> None:
    alone, together = runs(*DIGITS, "launch.nproc=1"), runs(*DIGITS, *overrides)
    assert alone.result.steps == together.result.steps == 30
    assert alone.result.samples == together.result.samples == 1438 + 7 * 64
    assert_equal(together, alone, 1e-10)
    np.testing.assert_allclose(together.losses, alone.losses, rtol=0, atol=1e-10)
    assert alone.losses[-1] < 0.5 * alone.losses[0]


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.long), 2])
def test_gradient_merge_equals_a_larger_batch(runs: Runs, nproc: int) -> None:
    large = runs(*DIGITS, "launch.nproc=1")
    merged = runs(*DIGITS, f"launch.nproc={nproc}", "strategy.gradient_merge.k_steps=2")
    assert merged.result.steps == large.result.steps
    assert_equal(merged, large, 1e-10)


def test_a_global_batch_that_nothing_divides_takes_the_same_updates_in_single_precision(runs: Runs) -> None:
    """44 updates an epoch, of 33 samples and one of 19. Bound: 50 updates, each off by some roundings of 2**-24 of its
    sums."""
    uneven = (*DIGITS, "precision=fp32", "data.global_batch_size=33", "max_steps=50")
    alone, together = runs(*uneven), runs(*uneven, "launch.nproc=2", "strategy.gradient_merge.k_steps=2")
    assert alone.result.steps == together.result.steps == 50
    assert alone.result.samples == together.result.samples == 1438 + 6 * 33
    assert_equal(together, alone, 50 * 2.0**-24)


@pytest.mark.parametrize("nproc", [1, 2])
def test_same_seed_twice_gives_the_identical_losses(runs: Runs, nproc: int) -> None:
    first, second = (runs(*AUGMENTED, f"launch.nproc={nproc}", "data.num_workers=0", again=n) for n in range(2))
    assert len(first.losses) == 12
    assert first.losses == second.losses
    assert_equal(first, second, 0.0)
    other = runs(*AUGMENTED, f"launch.nproc={nproc}", "data.num_workers=0", "seed=1")
    assert not set(first.losses) & set(other.losses)


@pytest.mark.all
def test_augmentation_depends_neither_on_reading_processes_nor_on_workers(runs: Runs) -> None:
    alone = runs(*AUGMENTED, "launch.nproc=1", "data.num_workers=0")
    for nproc, readers in ((1, 2), (2, 2)):
        other = runs(*AUGMENTED, f"launch.nproc={nproc}", f"data.num_workers={readers}")
        if nproc == 1:
            assert other.losses == alone.losses
        np.testing.assert_allclose(other.losses, alone.losses, rtol=1e-5)


@pytest.mark.all
def test_flowers_are_the_same_from_any_number_of_reading_processes(runs: Runs) -> None:
    here, two = (runs(*FLOWERS, f"data.num_workers={readers}") for readers in (0, 2))
    assert len(here.losses) == 4
    assert here.losses == two.losses
