"""Models with sparse tables: the same numbers from several processes as from one on the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import trainer
from tests.strategies.test_truth import losses

CLICKS = (
    "+recipe=wide_and_deep",
    "data.train_rows=1500",
    "data.val_rows=301",
    "data.hash_size=501",
    "model.hidden=[8]",
    "data.global_batch_size=64",
    "precision=fp64",
    "max_steps=12",
    "tracking=none",
    "device=cpu",
    "execution.threads=1",
    "execution.log_every=1",
    "scheduler.warmup_steps=0",
)
Runs = Callable[..., tuple[dict[str, np.ndarray], list[float], dict[str, float]]]


@pytest.fixture(scope="module")
def runs(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Weights, losses and final metrics by overrides, each done once."""

    @cache
    def run(*overrides: str) -> tuple[dict[str, np.ndarray], list[float], dict[str, float]]:
        folder: Path = tmp_path_factory.mktemp("run")
        cache = f"data.cache_dir={tmp_path_factory.getbasetemp() / 'clicks'}"
        result = trainer.run([*CLICKS, *overrides, cache, f"hydra.run.dir={folder}"])
        return load_file(folder / "model.safetensors"), losses(folder), result.metrics

    return run


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.long),
        ("optimizer=adamw", "optimizer.lr=0.01", "strategy.clip_norm=0.05"),
        ("optimizer=momentum", "optimizer.sparse=rowwise_adagrad"),
        ("strategy.gradient_merge.k_steps=2",),
    ],
    ids=" ".join,
)
def test_two_processes_equal_one(runs: Runs, overrides: tuple[str, ...]) -> None:
    alone = runs("strategy=single", *overrides)
    together = runs("launch.nproc=2", "strategy=collective", *overrides)
    for name, weights in alone[0].items():
        np.testing.assert_allclose(together[0][name], weights, rtol=0, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(together[1], alone[1], rtol=0, atol=1e-9)
    for name in ("val/loss", "val/auc", "val/acc", "val/rmse", "val/auc_share"):
        assert together[2][name] == pytest.approx(alone[2][name], abs=1e-9)
    assert len(set(alone[1])) == 12


@pytest.mark.all
def test_merged_batches_equal_a_larger_one(runs: Runs) -> None:
    large, merged = runs("strategy=single"), runs("strategy=single", "strategy.gradient_merge.k_steps=2")
    for name, weights in large[0].items():
        np.testing.assert_allclose(merged[0][name], weights, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.all
def test_unequal_workers_equal_one(runs: Runs) -> None:
    unequal = ("sampler.pad=false", "sampler.drop_last=false", "sampler.shuffle=false", "max_steps=25")
    alone, together = runs("strategy=single", *unequal), runs("launch.nproc=2", "strategy=collective", *unequal)
    for name, weights in alone[0].items():
        np.testing.assert_allclose(together[0][name], weights, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.all
def test_local_sgd_averages_tables_too(runs: Runs) -> None:
    weights, seen, _ = runs("launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=3")
    assert np.isfinite(seen).all() and np.isfinite(weights["embedding.weight"]).all()
