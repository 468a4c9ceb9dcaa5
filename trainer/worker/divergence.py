"""Callback of mode=lr_find: ends the training where the smoothed loss has grown far above its least value."""

from __future__ import annotations

import math

from trainer.worker.callbacks import UpdateEnd

MEMORY = 0.9
"""Share of the smoothed loss that each update keeps."""


class StopAtDivergence:
    """Ends a training that diverges.

    Args:
        times: the smoothed loss is so many times its least value.
    """

    def __init__(self, times: float) -> None:
        self.times = times
        self.smoothed, self.least, self.updates = 0.0, math.inf, 0

    def on_update_end(self, event: UpdateEnd) -> None:
        """Add the loss of an update, and ask all workers to end if it is not finite or far above the least one."""
        loss = event.loss.item()
        self.updates += 1
        self.smoothed = MEMORY * self.smoothed + (1 - MEMORY) * loss
        smoothed = self.smoothed / (1 - MEMORY**self.updates)
        if not math.isfinite(loss) or smoothed > self.times * self.least:
            event.stop(f"the loss diverges at lr {event.lr:.3g}")
        self.least = min(self.least, smoothed)
