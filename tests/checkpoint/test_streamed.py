"""What is written piece by piece is what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from trainer.checkpoint import streamed

TYPES = st.sampled_from(sorted(streamed.KINDS))
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=5), st.tuples(TYPES, SHAPES), max_size=6), st.integers(0, 99))
def test_every_tensor_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, told: dict[str, tuple[str, tuple[int, ...]]], seed: int
) -> None:
    told.pop("__metadata__", None)
    draw, path = np.random.default_rng(seed), tmp_path_factory.getbasetemp() / "streamed.safetensors"
    arrays = {name: (draw.random(shape) * 100).astype(kind) for name, (kind, shape) in told.items()}
    streamed.write(path, {name: streamed.of(array) for name, array in arrays.items()}, {"step": "é"})
    found = load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    with safe_open(path, "np") as file:  # type: ignore[no-untyped-call]
        assert file.metadata() == {"step": "é"}


@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
def test_rows_are_taken_in_the_order_that_is_asked_for_at_the_end(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "PIECE", 100)  # a few rows at once
    array, asked = np.arange(4000, dtype=np.float32).reshape(1000, 4), []
    places = np.random.default_rng(0).permutation(1000)[:rows]

    def later() -> np.ndarray:
        asked.append(1)
        return places

    one = streamed.rows_of(array, later, rows)
    assert not asked and one.nbytes == rows * 16
    streamed.write(tmp_path / "f", {"rows": one}, {})
    assert np.array_equal(load_file(tmp_path / "f")["rows"], array[places])
    assert np.array_equal(one.whole(), array[places])


def test_a_tensor_that_has_grown_meanwhile_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ids has changed"):
        streamed.write(tmp_path / "f", {"ids": streamed.rows_of(np.arange(9), lambda: np.arange(3), 2)}, {})
