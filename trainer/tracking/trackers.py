"""The trackers that a config names in ``tracking.trackers``: made, checked before the start, and shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.instantiate import call_target
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError
from trainer.tracking.contract import Tracker

LOGS = ("workerlog.*", "serverlog.*")
"""Files with what processes printed, which may be anything; they are cleaned of secrets at the end of the run."""


def made(name: str, node: Mapping[str, Any], run_dir: Path) -> Tracker:
    """Make a tracker of its node in the config.

    Raises:
        UserError: its class does not exist, is no tracker, or does not take the node's keys.
    """
    key = f"tracking.trackers.{name}"
    found = call_target(node, key, run_dir=run_dir)
    if not isinstance(found, Tracker):
        what = f"{key}._target_={node['_target_']}"
        raise UserError(what, "is no trainer.tracking.contract.Tracker", f"~{key}")
    return found


def every(tracking: TrackingConfig, run_dir: Path) -> Iterator[tuple[str, Tracker]]:
    """Yield the trackers of a run with their names."""
    for name, node in tracking.trackers.items():
        yield name, made(name, node, run_dir)


def check(tracking: TrackingConfig, run_dir: Path) -> None:
    """Refuse trackers that can never work here.

    Raises:
        UserError: e.g. a package is not installed.
    """
    for _, tracker in every(tracking, run_dir):
        tracker.check()


def rows(tracking: TrackingConfig, run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the plan's rows: where each tracker writes, and how that is opened."""
    places = [(name, tracker.where()) for name, tracker in every(tracking, run_dir)]
    if not places:
        yield "tracking", "none (the run folder only)"
    elif len(places) == 1:
        yield "tracking", places[0][1]
    else:
        yield "tracking", ", ".join(name for name, _ in places)
        for name, where in places:
            yield f"  {name}", where
    if (model := tracking.registered_model) is not None:
        yield "registers", f"models:/{model}@best and @last, at the end"
