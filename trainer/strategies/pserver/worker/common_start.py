"""The first step of workers that have no common step later: together, or each when it is ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.schema import FreeStrategy
from trainer.strategies.contract import Lease
from trainer.strategies.pserver.worker.worker import PserverWorker


class CommonStart(PserverWorker):
    """The worker's side that pserver_async, pserver_ssp and pserver_geo share: ``launch_barrier``.

    Attributes:
        begun: this worker has met the others, or need not.
    """

    Options = FreeStrategy
    options: FreeStrategy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = False

    def begin(self) -> None:
        """Begin the first step together with all workers, if ``launch_barrier`` asks for it."""
        if not self.begun and self.options.launch_barrier:
            self.meet()
        self.begun = True

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        self.begin()  # before any work: a worker may find none left
        yield from super().leases(epoch, blocks)

    def go_on(self, **state: Any) -> None:
        self.begun = True  # others may be past their last update of the epoch

    def begin_anew(self, workers: int) -> None:
        self.begun = True
