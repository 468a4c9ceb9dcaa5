"""The example input of a trained model, which other commands read while a run writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.worker import example


def test_who_reads_meanwhile_finds_the_whole_example_of_the_life_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = SimpleNamespace(mean=None, std=None)
    savez, seen = np.savez_compressed, []

    def read_meanwhile(file: Any, **arrays: Any) -> None:
        seen.append(example.sample(tmp_path))
        savez(file, **arrays)
        seen.append(example.sample(tmp_path))

    example.keep(tmp_path, {}, "fp32", place, torch.zeros(1, 2))
    monkeypatch.setattr(np, "savez_compressed", read_meanwhile)
    example.keep(tmp_path, {}, "fp32", place, torch.ones(1, 2))
    assert np.array_equal(seen, np.zeros((2, 1, 2)))
    assert np.array_equal(example.sample(tmp_path), np.ones((1, 2)))
