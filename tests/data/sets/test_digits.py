"""data=digits is what scikit-learn loads, read without importing scikit-learn, which takes longer than an epoch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from trainer.data.sets.digits import read_digits


def same(pair: tuple[np.ndarray, np.ndarray]) -> bool:
    from sklearn.datasets import load_digits

    truth = load_digits()
    images, labels = pair
    return np.array_equal(images, truth.images) and np.array_equal(labels, truth.target) and labels.dtype == np.int64


def test_digits_are_those_of_scikit_learn() -> None:
    assert same(read_digits())


def test_digits_are_there_where_scikit_learn_keeps_them_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert same(read_digits())


def test_reading_digits_imports_no_scikit_learn() -> None:
    code = (
        "import sys; from trainer.data.sets.digits import read_digits; read_digits(); sys.exit('sklearn' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
