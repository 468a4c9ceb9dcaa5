"""Reopens the MLflow run of a training that resumes from a checkpoint, or opens another if it is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import redact
from trainer.tracking.contract import TrackedRun

RESUMED_FROM, RUN_DIR = "trainer.resumed_from", "trainer.run_dir"
CHANGED = "trainer.changed."
"""Prefix of tags for parameters that have changed since the first life: MLflow keeps the first value of a parameter."""
OF_AN_END = ("trainer.error", "trainer.ended", "trainer.state", "trainer.lost_workers", "trainer.not_copied")
"""Tags that tell how a life ended."""
NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's answers for an id that no run has, and for one that none can have (``my/run``)."""


def find(client: Any, run_id: str) -> Any:
    """Find the MLflow run to reopen; None if it was deleted, belongs to another store, or the id cannot be a run's.

    Raises:
        Exception: what MLflow raises for a server that is away.
    """
    try:
        found = client.get_run(run_id)
    except Exception as error:
        if getattr(error, "error_code", "") not in NO_SUCH_RUN:
            raise
        return None
    return None if found.info.lifecycle_stage == "deleted" else found


def joined(client: Any, run: TrackedRun, say: Callable[[str], None]) -> Any:
    """Find the MLflow run that a platform has opened for this command (``MLFLOW_RUN_ID``); None: the run gets its own.

    Args:
        say: shows a line to the user.
    """
    if not (run_id := run.mlflow.get("join")):
        return None
    found = find(client, run_id)
    if found is None:
        uri = redact.text(str(run.mlflow["uri"]))
        say(f"MLFLOW_RUN_ID={run_id}: there is no such run at {uri}; this run gets one of its own")
        return None
    if other := found.data.tags.get(RUN_DIR):
        say(f"MLFLOW_RUN_ID={run_id} is the run of {other}; this run gets one of its own")
        return None
    say(f"this run goes into the run {run_id} of MLFLOW_RUN_ID")
    return found


def go_on(client: Any, run: Any, tags: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    """Set an MLflow run to running, with the tags of its new life; returns the parameters that it does not have."""
    run_id, there, had = run.info.run_id, dict(run.data.params), dict(run.data.tags)
    client.update_run(run_id, status="RUNNING")
    other = {k: v for k, v in params.items() if there.get(k, v) != v and not k.startswith("resume.")}
    changed = {f"{CHANGED}{k}"[:250]: v[:5000] for k, v in other.items()}
    now = {**tags, **changed}
    for name in had:
        if name not in now and (name in OF_AN_END or name.startswith(CHANGED)):
            client.delete_tag(run_id, name)
    for name, value in now.items():
        if had.get(name) != value:
            client.set_tag(run_id, name, value)
    return {k: v for k, v in params.items() if k not in there}
