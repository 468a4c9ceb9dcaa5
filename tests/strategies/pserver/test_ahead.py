"""Rows of the next batch in a checkpoint: used for that batch, dropped for another one, refused where the data have
changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import RunFailed
from trainer.strategies.pserver.worker.ahead import Ahead

EARLIER, HERE, LATER = (0, 1, 0), (0, 1, 1), (0, 1, 2)


def resumed(ids: list[int], place: tuple[int, int, int] | None) -> Ahead:
    """A worker's view of its next batch, with the rows that a checkpoint has of these ids."""
    table: Any = SimpleNamespace(number=0, name="table")
    ahead = Ahead([table])
    rows = torch.arange(len(ids), dtype=torch.float32)[:, None]
    ahead.load({0: ""}, ({0: torch.tensor(ids).numpy()}, {0: rows}), None if place is None else list(place))
    return ahead


@pytest.mark.parametrize("place", [None, HERE])
def test_rows_of_the_batch_that_comes_are_used_once(place: tuple[int, int, int] | None) -> None:
    ahead, ids = resumed([3, 5], place), torch.tensor([5, 3, 5])
    ahead.expect(torch.tensor([8]), None if place is None else LATER)  # the feed is a batch ahead
    ahead.computing(ids, place)
    assert ahead.recall() and not ahead.recall()
    taken = ahead.take(ahead.tables[0], ids)
    assert taken is not None and taken[0].tolist() == [3, 5] and taken[2].tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("ids", [[3, 5], [7]])
def test_rows_of_another_batch_are_dropped(ids: list[int]) -> None:
    """A server that was started again had lost an earlier batch of the block, which comes once more."""
    ahead, coming = resumed([3, 5], HERE), torch.tensor(ids)
    ahead.computing(coming, EARLIER)
    assert not ahead.recall() and ahead.take(ahead.tables[0], coming) is None
    ahead.computing(torch.tensor([3, 5]), HERE)
    assert not ahead.recall(), "servers have other rows by then"


@pytest.mark.parametrize("place", [None, HERE])
def test_other_ids_of_the_same_batch_are_refused(place: tuple[int, int, int] | None) -> None:
    ahead = resumed([3, 5], place)
    ahead.computing(torch.tensor([3, 6]), HERE)
    with pytest.raises(RunFailed, match="the data are others than when the checkpoint was made"):
        ahead.recall()


def test_a_checkpoint_keeps_the_place_of_the_batch_that_comes() -> None:
    ahead = resumed([3, 5], EARLIER)
    assert ahead.state()["place"] == EARLIER
    ahead.expect(torch.tensor([1]), HERE)
    assert ahead.state()["place"] == EARLIER, "its rows are not there yet"
    fetched: Any = SimpleNamespace(rows={})
    ahead.fetched = {}, fetched
    assert ahead.state()["place"] == HERE


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
