"""Checks the names of runs, experiments, models and tags that a config gives to MLflow, without mlflow."""

from __future__ import annotations

import os
import re

from trainer.config.run_config import RunConfig
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError
from trainer.planning.tracking_store import check_store


def check_tracking(config: RunConfig) -> None:
    """Refuse a tracking store that cannot work, and names of runs, experiments and tags that it does not accept."""
    tracking = config.tracking
    check_store(tracking, experiment_of(config))
    for key, most in (("experiment", 256), ("run_name", 250)):
        if len(given := getattr(tracking, key) or "") > most:
            raise UserError(f"tracking.{key}={given}", f"is longer than {most} characters", f"tracking.{key}=null")
    check_registered(tracking)
    for name, value in tracking.tags.items():
        if not re.fullmatch(r"[\w\-. :/]{1,250}", str(name)) or os.path.normpath(str(name)) != str(name):
            raise UserError(f"tracking.tags.{name}", "is no name that MLflow takes: letters, digits, _ - . : / and spaces", "+tracking.tags.NAME=VALUE")  # fmt: skip
        if len(str(value)) > 8000:
            raise UserError(f"tracking.tags.{name}", "is longer than the 8000 characters that MLflow takes")


def check_registered(tracking: TrackingConfig) -> None:
    """Refuse a ``tracking.registered_model`` whose name MLflow does not accept, or if no model is logged."""
    name = tracking.registered_model
    if name is None:
        return
    what, none = f"tracking.registered_model={name}", "tracking.registered_model=null"
    if re.search(r"[/:'\"%]", name) or len(name) > 256:
        raise UserError(
            what, "is no name for MLflow's registry: at most 256 characters, and none of / : % and quotes", none
        )
    if tracking.kind == "none" or not tracking.log_model:
        which = "tracking=none" if tracking.kind == "none" else "tracking.log_model=false"
        raise UserError(what, f"registers the logged models, and with {which} there are none", none)


def experiment_of(config: RunConfig) -> str:
    """The name of the run's MLflow experiment: ``tracking.experiment``, else the config's name."""
    return str(config.tracking.experiment or config.name)
