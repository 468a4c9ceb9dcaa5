"""A callback whose worker writes its first part of a checkpoint only when its training has gone on for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from trainer.checkpoint.tensor_tree import Packed
from trainer.worker import checkpoints
from trainer.worker.callbacks import TrainStart, UpdateEnd


class SlowWrites:
    """Rank 0 writes the checkpoint of its first update after its update ``until``; the weights of the first are kept in
    ``first``.

    In ``threads`` is how many threads wrote checkpoints at the same time.
    """

    def __init__(self, until: int) -> None:
        self.until, self.goes_on, self.threads = until, threading.Event(), 0

    def on_train_start(self, event: TrainStart) -> None:
        if event.rank == 0:
            checkpoints.SLOW_S = 0.01
            checkpoints.write_part = self._after_all(checkpoints.write_part)  # type: ignore[assignment]

    def _after_all(self, write: Callable[[Path, str, Packed], str]) -> Callable[[Path, str, Packed], str]:
        def written(folder: Path, name: str, packed: Packed) -> str:
            self.threads = max(self.threads, sum(thread.name == "checkpoint" for thread in threading.enumerate()))
            assert self.goes_on.wait(60), "the training waits for the disk"
            return write(folder, name, packed)

        return written

    def on_update_end(self, event: UpdateEnd) -> None:
        if event.rank:
            return
        if event.step == 1:
            save_file(
                {name: value.clone() for name, value in event.model.state_dict().items()}, event.run_dir / "first"
            )
        if event.step == self.until:
            (event.run_dir / "threads").write_text(str(self.threads))
            self.goes_on.set()
