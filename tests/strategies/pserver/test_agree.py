"""What workers do together, as a validation or a save, is done again by those who are left if one is lost meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.config.schema import PserverAsyncStrategy, PserverSyncStrategy
from trainer.strategies.pserver.worker.async_and_ssp import PserverAsync
from trainer.strategies.pserver.worker.sync import PserverSync
from trainer.strategies.pserver.worker.worker import PserverWorker

STAYS, CONTINUES = PserverAsyncStrategy(), PserverSyncStrategy(on_lost_worker="continue")


def worker_of(kind: type[PserverWorker], options: Any, present: list[list[int]]) -> PserverWorker:
    """Worker 2 of 3; who is present at each of its meetings."""
    worker = kind.__new__(kind)
    worker.options, worker.present = options, [0, 1, 2]
    worker.seat = SimpleNamespace(rank=2)  # type: ignore[assignment]

    def meets(mine: np.ndarray, flags: int = 0) -> np.ndarray:
        worker.present = present.pop(0)
        return mine

    worker._sum = meets  # type: ignore[method-assign]
    return worker


@pytest.mark.parametrize(("kind", "options"), [(PserverAsync, STAYS), (PserverSync, CONTINUES)])
def test_it_is_done_again_by_those_who_are_left_until_nobody_is_lost(kind: type[PserverWorker], options: Any) -> None:
    asked: list[tuple[int, int]] = []

    def validates(index: int, count: int) -> int:
        asked.append((index, count))
        return len(asked)

    worker = worker_of(kind, options, [[1, 2], [2], [2]])
    assert worker.agree(validates) == 3
    assert asked == [(2, 3), (1, 2), (0, 1)], "each sample is that of one worker among those who are left"


def test_it_is_done_once_where_nobody_is_lost() -> None:
    worker = worker_of(PserverAsync, STAYS, [[0, 1, 2]])
    assert worker.agree(lambda index, count: (index, count)) == (2, 3)
