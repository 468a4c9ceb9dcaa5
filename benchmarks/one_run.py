"""A run's workers that measure instead of training, for benchmarks that compare loops in one process."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.launch.forkserver import Forked, launch
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.started_process import Role


def measured(
    module: str,
    overrides: list[str],
    devices: list[str],
    rounds: int,
    function: str = "measure",
    question: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """What a function of that module finds in worker 0 of a run with these overrides, one worker to a device.

    Each worker calls ``measure(seat, payload)``; the payload has the run's ``assignment``, ``rounds`` and the question.
    """
    from trainer.cli import compose
    from trainer.job.check import get_ready

    with tempfile.TemporaryDirectory() as folder:
        with compose.hydra_app() as app:
            ready = get_ready(compose.plain(compose.compose(app, overrides)), [], folder)
        (Path(folder) / "checkpoints").mkdir()
        payload = {"assignment": ready.assignment, "rounds": rounds, **question}
        role = Role("worker", len(devices), f"{module}:{function}", devices)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            results = launch([role], payload, Path(folder), Rendezvous(), Forked([module]))
    found: dict[str, Any] = json.loads(json.dumps(results.of["worker"][0]))
    return found
