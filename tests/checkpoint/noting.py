"""A callback that keeps the weights of each better validation, and the run's best weights as a life finds them."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from trainer.worker.callbacks import UpdateEnd, ValidationEnd


class Noting:
    """``improved.STEP`` and, with the best weights of the run when a life's first update is done, ``found.STEP``."""

    def __init__(self) -> None:
        self.began = False

    def on_update_end(self, event: UpdateEnd) -> None:
        best = Path(event.run_dir) / "checkpoints" / "best.safetensors"
        if not self.began and event.rank == 0 and best.is_file():
            shutil.copyfile(best, Path(event.run_dir) / f"found.{event.step}")
        self.began = True

    def on_validation_end(self, event: ValidationEnd) -> None:
        if event.improved:
            weights = {name: value.detach().clone() for name, value in event.model.state_dict().items()}
            save_file(weights, Path(event.run_dir) / f"improved.{event.step}")
