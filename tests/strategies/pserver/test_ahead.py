"""Rows of the next batch in a checkpoint: used for that batch, refused where the data have changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import RunFailed
from trainer.strategies.pserver.worker.ahead import Ahead


def resumed(ids: list[int]) -> Ahead:
    """A worker's view of its next batch, with the rows that a checkpoint has of these ids."""
    table: Any = SimpleNamespace(number=0, name="table")
    ahead = Ahead([table])
    rows = torch.arange(len(ids), dtype=torch.float32)[:, None]
    ahead.load({0: ""}, ({0: torch.tensor(ids).numpy()}, {0: rows}))
    return ahead


def test_rows_of_the_batch_that_comes_are_used_once() -> None:
    ahead, ids = resumed([3, 5]), torch.tensor([5, 3, 5])
    ahead.expect(torch.tensor([8]))  # the feed is a batch ahead
    ahead.computing(ids)
    assert ahead.recall() and not ahead.recall()
    taken = ahead.take(ahead.tables[0], ids)
    assert taken is not None and taken[0].tolist() == [3, 5] and taken[2].tolist() == [[0.0], [1.0]]


def test_other_ids_of_the_next_batch_are_refused() -> None:
    ahead = resumed([3, 5])
    ahead.computing(torch.tensor([3, 6]))
    with pytest.raises(RunFailed, match="the data are others than when the checkpoint was made"):
        ahead.recall()


def test_ids_that_the_model_computes_are_not_fetched_ahead_and_the_log_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table: Any = SimpleNamespace(number=1, name="computed")
    ahead = Ahead([table])
    for _ in range(3):
        inputs = torch.tensor([1, 2])
        ahead.computing(inputs)
        ahead.learn_path(table, inputs + 7)
        ahead.expect(torch.tensor([3]))
        assert ahead.coming() == {}
    assert (
        capsys.readouterr().out
        == "table computed: its ids are computed inside the model, so its rows cannot be fetched ahead\n"
    )
