"""Whether torchrun has started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with these variables is one of torchrun's ranks (TORCHELASTIC_RUN_ID and RANK are set)."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment
