"""A model that has its own process asked to leave, in the middle of a validation."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.dropping import DroppingAlways

LEAVE = Path("leave")
"""In the working folder: the rank whose process gets SIGUSR1, and before which of its validation batches, from 0; each
once."""


class Leaving(DroppingAlways):
    """DroppingAlways; a run has to validate again with the same numbers."""

    validated = 0

    def forward(self, images: torch.Tensor) -> Any:
        if not self.training and (rank := os.environ.get("RANK")) is not None:
            with contextlib.suppress(FileNotFoundError):
                if LEAVE.read_text() == f"{rank} {self.validated}":
                    LEAVE.unlink()
                    os.kill(os.getpid(), signal.SIGUSR1)
            self.validated += 1
        return super().forward(images)
