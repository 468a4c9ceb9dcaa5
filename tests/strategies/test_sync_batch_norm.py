"""Synchronised batch norm over several workers is torch's ordinary one over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.entries import norm_batches, own_norm, through
from tests.strategies.launching import Case, launched
from trainer.models.sync_batch_norm import synchronised

SPLITS = {"even": [4, 4], "uneven": [7, 1], "second without samples": [8, 0], "first without samples": [0, 8]}
PATHS = ("by_operators", "by_kernels")
CASES = {
    f"{split} {momentum} {path}": Case("normalised", (), {"sizes": sizes, "momentum": momentum, "path": path})
    for split, sizes in SPLITS.items()
    for momentum in (0.1, None)
    for path in PATHS
}
NET = ("model=norm_net", "max_steps=20")
UNEVEN = ("sampler.pad=false", "sampler.drop_last=false", "data.train_samples=37")
RUNS = {
    "even": Case("settled", (*NET, "strategy.sync_batch_norm=true")),
    "uneven": Case("settled", (*NET, *UNEVEN, "strategy.sync_batch_norm=true")),
    "apart": Case("settled", NET),
}


@pytest.fixture(scope="module")
def together(warm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What two workers answered, by case and rank."""
    workers = launched("collective", 2, {**CASES, **RUNS}, tmp_path_factory.mktemp("norm"))["worker"]
    return {name: [workers[rank]["answers"][n] for rank in range(2)] for n, name in enumerate((*CASES, *RUNS))}


def assert_close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("split", SPLITS)
def test_sync_batch_norm_equals_ordinary_on_the_whole_batch(
    together: dict[str, list[dict[str, Any]]], split: str, momentum: float | None, path: str
) -> None:
    answers = together[f"{split} {momentum} {path}"]
    norm = nn.Sequential(own_norm(momentum))
    inputs, weights = norm_batches(8)
    outputs, gradients = through(norm, inputs, weights)
    for batch in range(3):
        assert_close(np.concatenate([a["outputs"][batch] for a in answers]), outputs[batch])
        assert_close(np.concatenate([a["gradients"][batch] for a in answers]), gradients[batch])
    evaluated = norm.eval()(inputs[0]).detach().numpy()
    assert_close(np.concatenate([a["evaluated"] for a in answers]), evaluated)
    for answer in answers:
        assert answer["kind"] == "SyncBatchNorm"
        for mine, whole in zip(answer["parameters"], norm.parameters(), strict=True):
            assert_close(mine, whole.grad.numpy())
        assert answer["state"].keys() == norm.state_dict().keys()
        for name, value in norm.state_dict().items():
            assert_close(answer["state"][name], value.numpy())


@pytest.mark.parametrize("case", ["even", "uneven"])
def test_training_with_sync_batch_norm_equals_one_process(
    together: dict[str, list[dict[str, Any]]], tmp_path: Path, case: str
) -> None:
    overrides = tuple(o for o in RUNS[case].overrides if "sync_batch_norm" not in o)
    [alone] = launched("single", 1, {case: Case("settled", overrides)}, tmp_path)["worker"][0]["answers"]
    for answer in together[case]:
        for kind in ("parameters", "before"):
            for name in alone[kind]:
                np.testing.assert_allclose(answer[kind][name], alone[kind][name], rtol=0, atol=1e-10, err_msg=name)
    apart = together["apart"][0]["parameters"]
    assert any(np.abs(apart[name] - alone["parameters"][name]).max() > 1e-6 for name in apart)


def test_synchronised_keeps_parameters_buffers_and_names() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ModuleDict({"norm": nn.BatchNorm1d(3)}), nn.LayerNorm(3)).eval()
    before = model.state_dict(keep_vars=True)
    after = synchronised(model).state_dict(keep_vars=True)
    assert {name: id(value) for name, value in after.items()} == {name: id(value) for name, value in before.items()}
    assert not any(module.training for module in model.modules())


def test_without_a_process_group_it_is_torchs_own() -> None:
    inputs = torch.randn(6, 3, 4, 5, dtype=torch.float64)
    assert torch.equal(synchronised(own_norm(0.1))(inputs), own_norm(0.1)(inputs))
