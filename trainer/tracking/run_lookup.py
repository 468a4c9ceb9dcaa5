"""Finds a run's folder by its MLflow run id, from the tag ``trainer.run_dir``; a separate process imports mlflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trainer.config.redact import text
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError, first_line
from trainer.host import json_text
from trainer.planning.tracking_store import check_store, chosen, named, tracking_uri
from trainer.tracking import mlflow_settings
from trainer.tracking.client import environment
from trainer.tracking.reopened_run import NO_SUCH_RUN, RUN_DIR

PATIENCE_S = 60.0
INSTEAD = "resume=FOLDER of the run"


def folder_of(tracking: TrackingConfig, run_id: str, what: str = "", instead: str = INSTEAD) -> Path:
    """Look up the folder of an MLflow run by its id (``resume=RUN_ID``).

    Args:
        what: was typed, and what to type instead, for a refusal.

    Raises:
        UserError: there is no such run, or its folder is not on this machine.
    """
    what, uri = what or f"resume={run_id}", tracking_uri(tracking)
    if not uri:
        raise UserError(what, f"is an MLflow run, and tracking={chosen(tracking)} asks no server", instead)
    check_store(tracking, None)
    answer = _asked(uri, run_id)
    if "error" in answer:
        raise UserError(what, f"{named(tracking)} cannot be asked: {answer['error']}", instead)
    if not answer.get("there"):
        raise UserError(what, f"there is no such run at {named(tracking)}", f"{instead}, or another tracking.uri")
    folder = answer.get("folder")
    if not folder:
        raise UserError(what, f"the run has no tag {RUN_DIR}: no training of ours made it", instead)
    if not Path(folder).is_dir():
        raise UserError(what, f"the run's folder {folder} is not there", instead)
    return Path(folder)


def _asked(uri: str, run_id: str) -> dict[str, str]:
    """Ask in another process. The address may hold a password, so it goes through standard input."""
    try:
        done = subprocess.run(  # this interpreter with this module; no shell  # nosec B603
            [sys.executable, "-m", "trainer.tracking.run_lookup"],
            input=json.dumps([uri, run_id]),
            capture_output=True,
            text=True,
            env=environment(),
            timeout=PATIENCE_S,
        )
        return dict(json_text.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PATIENCE_S:g} s"}
    except ValueError:
        return {"error": first_line(ValueError(done.stderr.strip().splitlines()[-1:] or "no answer"))}


def _fetch(uri: str, run_id: str) -> dict[str, str]:
    """Ask the tracking server for an MLflow run: returns its folder, an error, or {} if there is no such run."""
    try:
        run = mlflow_settings.client(uri).get_run(run_id)
    except Exception as error:  # whatever MLflow raises for a server that is away
        if getattr(error, "error_code", "") in NO_SUCH_RUN:
            return {}
        return {"error": text(first_line(error)[:300])}
    return {"there": "yes", "folder": run.data.tags.get(RUN_DIR, "")}


if __name__ == "__main__":
    mlflow_settings.settle()
    asked = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr
    found = _fetch(*asked)
    print(json.dumps(found), file=answers)
