"""Whether torchrun, or an engine with several tasks on a host, has started this process as a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

RANKS = "TRAINER_RANKS"
"""What has started several tasks on a host that are ranks as of torchrun (:mod:`trainer.host.engine_ranks`)."""


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with these variables is a rank: torchrun's (TORCHELASTIC_RUN_ID), or an engine's task."""
    return "RANK" in environment and ("TORCHELASTIC_RUN_ID" in environment or RANKS in environment)


def starter_of(environment: Mapping[str, str] = os.environ) -> str:
    """What has started the ranks, in messages."""
    return environment.get(RANKS, "torchrun")
