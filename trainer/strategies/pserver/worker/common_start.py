"""The first step of asynchronous workers: all together, or each when it is ready (``launch_barrier``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.config.schema import FreeStrategy
from trainer.strategies.contract import Lease
from trainer.strategies.pserver.worker.worker import PserverWorker


class CommonStart(PserverWorker):
    """Base class of the pserver_async, pserver_ssp and pserver_geo workers, with ``launch_barrier``.

    Attributes:
        begun: this worker has met the others, or does not have to.
    """

    Options = FreeStrategy
    options: FreeStrategy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = False

    def begin(self) -> None:
        """Before the first step, wait for all workers if ``launch_barrier`` is set."""
        if not self.begun and self.options.launch_barrier:
            self._sum(np.zeros(1))
        self.begun = True

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        self.begin()  # before any work: a worker may find none left
        yield from super().leases(epoch, blocks)

    def go_on(self, **state: Any) -> None:
        self.begun = True  # others may be past their last update of the epoch

    def begin_anew(self, workers: int) -> None:
        self.begun = True
