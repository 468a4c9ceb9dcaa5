"""A callback that makes a run of seconds take a minute."""

from __future__ import annotations

import time
from typing import Any

PAUSE_S = 0.15


class Slow:
    """Waits after each update."""

    def on_update_end(self, event: Any) -> None:
        time.sleep(PAUSE_S)
