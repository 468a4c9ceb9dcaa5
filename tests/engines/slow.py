"""A callback that keeps the first life of a run of seconds until its engine ends it."""

from __future__ import annotations

import os
import time
from typing import Any

PAUSE_S = 0.2


class Slow:
    """Waits after each update of the first life."""

    def on_update_end(self, event: Any) -> None:
        if "TRAINER_RESUME" not in os.environ:
            time.sleep(PAUSE_S)
