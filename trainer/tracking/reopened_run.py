"""Reopens the MLflow run of a training that resumes from a checkpoint, or opens another if it is gone."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.run_folder import tracking_file
from trainer.run_folder.tracking_file import Remembered
from trainer.tracking.recorder_answers import tell

RESUMED_FROM, RUN_DIR = "trainer.resumed_from", "trainer.run_dir"
CHANGED = "trainer.changed."
"""Tags of parameters that have another value than in the first life: MLflow keeps a parameter as it was."""
OF_AN_END = ("trainer.error", "trainer.ended", "trainer.state", "trainer.lost_workers", "trainer.not_copied")
"""Tags that tell how a life ended."""
NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's answers for an id that no run has, and for one that none can have (``my/run``)."""


def find(client: Any, run_id: str) -> Any:
    """Find the MLflow run to reopen; None if it was deleted or belongs to another store, or if that is no id of a run.

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


def joined(client: Any, run: Mapping[str, Any]) -> str | None:
    """Return the id of the MLflow run that a platform has opened for this command (``MLFLOW_RUN_ID``); None: the run
    gets one of its own."""
    if not (run_id := run.get("join")):
        return None
    found = find(client, run_id)
    if found is None:
        tell(
            {
                "warning": (
                    f"MLFLOW_RUN_ID={run_id}: there is no such run at {redact.text(run['uri'])}; this run gets "
                    f"one of its own"
                )
            }
        )
        return None
    if other := found.data.tags.get(RUN_DIR):
        tell({"warning": f"MLFLOW_RUN_ID={run_id} is the run of {other}; this run gets one of its own"})
        return None
    tell({"told": f"this run goes into the run {run_id} of MLFLOW_RUN_ID"})
    return str(run_id)


def go_on(client: Any, run: Any, tags: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    """Set an MLflow run to running again, with the tags of its new life; returns the parameters that it lacks."""
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


def anew(run: Mapping[str, Any], before: str) -> dict[str, Any]:
    """Make the message that opens a new MLflow run if the old one cannot be reopened; a tag names the old one."""
    tags = {**run["tags"], RESUMED_FROM: before}
    return {**run, "tags": tags, "opened": uuid.uuid4().hex, "resumed": False}


def taken_up(run_dir: Path, run: Mapping[str, Any]) -> Remembered | None:
    """How far the MLflow run to reopen had come, with the message that reopens it; None if it was not tracked."""
    told = tracking_file.read(run_dir)
    if told is None:
        return None
    if (twin := _twin(run_dir, told)) is not None:
        whose = f"the run {told.run_id}" if told.run_id else "a run"
        tell(
            {
                "told": (
                    f"{run_dir} is a copy of {twin}, which has {whose}; this folder gets one of its own, with all "
                    f"points"
                )
            }
        )
        return Remembered(told.uri, told.experiment, None, run=anew(run, told.run_id or str(twin)))
    if (told.uri, told.experiment) != (redact.text(run["uri"]), run["experiment"]):
        return Remembered(told.uri, told.experiment, None, run=anew(run, told.run_id or told.uri))
    if told.run_id and run.get("join") not in (None, told.run_id):
        tell({"told": f"the run goes on in its MLflow run {told.run_id}; MLFLOW_RUN_ID={run['join']} is not used"})
    first = {name: told.run.get(name, run[name]) for name in ("opened", "start_time")}
    return replace(told, run={**run, **first})


def _twin(run_dir: Path, told: Remembered) -> Path | None:
    """The folder of which this one is a copy, so that both would write into one MLflow run; None: it was moved, if
    anything."""
    before = Path(str(told.run.get("tags", {}).get(RUN_DIR, run_dir)))
    other = tracking_file.read(before)
    if other is None or other.run.get("opened") != told.run.get("opened") or before.samefile(run_dir):
        return None
    return before
