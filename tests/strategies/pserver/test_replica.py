"""Geo's replicas and the server's table: with an exchange after every step the rows are the average of the workers'
own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import Sgd
from trainer.strategies.pserver.worker.replica import Replica
from trainer.weights.fresh_rows import RowInit

ROWS, DIM, ROUNDS, LR = 12, 3, 15, 0.5


class Exchanges:
    """A server's table, and workers' replicas that talk to it one after the other."""

    def __init__(self, workers: int) -> None:
        self.table = SparseTable(
            "rows", DIM, torch.float64, 5, RowInit("normal", 0.3), Sgd(), num_rows=ROWS, workers=workers
        )
        self.replicas = [Replica(DIM, torch.float64, Sgd(), ROWS) for _ in range(workers)]
        self.cursors, self.version = [0] * workers, 0

    def look_up(self, worker: int, ids: np.ndarray) -> torch.Tensor:
        missing = self.replicas[worker].missing(ids)
        if len(missing):
            self.replicas[worker].insert(missing, self.table.pull(missing))
            self.table.hold(worker, missing)
        return self.replicas[worker].look_up(ids)

    def exchange(self, worker: int) -> None:
        replica = self.replicas[worker]
        pushed = replica.differences(1 / len(self.replicas))
        self.version += 1
        self.table.add(*pushed[:2], worker, self.version)
        replica.fold(pushed, *self.table.refresh(worker, self.cursors[worker]), settle=False)
        self.cursors[worker] = self.version


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_exchange_after_every_step_of_sgd_is_averaging(workers: int) -> None:
    random = np.random.default_rng(workers)
    geo = Exchanges(workers)
    everything = np.arange(ROWS)
    average = geo.table.pull(everything, create=False).numpy()
    seen = [set() for _ in range(workers)]
    for _ in range(ROUNDS):
        own = []
        for worker in range(workers):
            ids = np.sort(random.choice(ROWS, size=5, replace=False))
            targets = random.normal(size=(len(ids), DIM))
            before = geo.look_up(worker, ids)
            np.testing.assert_allclose(before, average[ids], rtol=0, atol=1e-13)
            geo.replicas[worker].update(ids, before - torch.from_numpy(targets), LR)
            own.append(average.copy())
            own[-1][ids] -= LR * (average[ids] - targets)
            seen[worker] |= set(ids.tolist())
        for worker in random.permutation(workers):
            geo.exchange(worker)
        average = np.mean(own, axis=0)
        np.testing.assert_allclose(geo.table.pull(everything, create=False), average, rtol=0, atol=1e-13)
        for worker in random.permutation(workers):  # a meeting: nobody has moved since, so all learn what all have done
            geo.exchange(worker)
            held = np.array(sorted(seen[worker]))
            np.testing.assert_allclose(geo.replicas[worker].look_up(held), average[held], rtol=0, atol=1e-13)


def test_a_step_that_was_taken_while_the_exchange_was_under_way_is_kept() -> None:
    geo, ids = Exchanges(2), np.array([3])
    start = geo.look_up(0, ids)
    geo.look_up(1, ids)
    gradients = [torch.full((1, DIM), value, dtype=torch.float64) for value in (1.0, 2.0, 4.0)]
    geo.replicas[1].update(ids, gradients[2], LR)
    geo.exchange(1)
    geo.replicas[0].update(ids, gradients[0], LR)
    pushed = geo.replicas[0].differences(0.5)
    geo.version += 1
    geo.table.add(*pushed[:2], 0, geo.version)
    news = geo.table.refresh(0, geo.cursors[0])
    geo.replicas[0].update(ids, gradients[1], LR)  # meanwhile
    geo.replicas[0].fold(pushed, *news, settle=False)
    server = start - LR * (gradients[0] + gradients[2]) / 2
    torch.testing.assert_close(geo.table.pull(ids), server, rtol=0, atol=1e-13)
    torch.testing.assert_close(geo.replicas[0].look_up(ids), server - LR * gradients[1], rtol=0, atol=1e-13)
    _, share, _ = geo.replicas[0].differences(0.5)
    torch.testing.assert_close(share, -LR * gradients[1] / 2, rtol=0, atol=1e-13)
