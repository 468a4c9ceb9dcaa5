"""tracking.registered_model: registers a run's logged models in MLflow's registry, with the aliases best and last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATER = ("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_CONFLICT")
"""MLflow's error codes after which registering is tried again."""
BEGAN, WHICH = "trainer.began", "trainer.which"
"""Tags of a version: when its run began (ms since 1970), and the alias that it was made for."""


def register(
    client: Any,
    name: str,
    run_id: str,
    began: int,
    models: Mapping[str, str],
    metrics: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """Register the run's logged models as versions; can be repeated, as it only adds what is missing.

    An alias moves to this run's version, but for one that a newer run has.

    Args:
        name: of the registered model, which is made where it is not there.
        began: when the run began, in ms since 1970.
        models: the logged models' ids by alias.
        metrics: what was measured of each, by alias, which become tags of its version.

    Returns:
        What was done, in one line.

    Raises:
        Exception: what MLflow raises.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if "ALREADY_EXISTS" not in str(error.error_code):
            raise
    there = {v.tags.get(WHICH): v for v in client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")}
    done = []
    for alias, model_id in models.items():
        measured = {key: f"{value:.6g}" for key, value in (metrics or {}).get(alias, {}).items()}
        version = there.get(alias) or client.create_model_version(
            name,
            f"models:/{model_id}",
            run_id,
            {WHICH: alias, BEGAN: str(began), **measured},
            await_creation_for=0,
            model_id=model_id,
        )
        if (newer := _newer(client, name, alias, began)) is not None:
            done.append(
                f"version {version.version} without the alias {alias}, which version {newer} of a newer run keeps"
            )
            continue
        client.set_registered_model_alias(name, alias, str(version.version))
        done.append(f"version {version.version} is models:/{name}@{alias}")
    return f"registered {name}: {', '.join(done)}"


def _newer(client: Any, name: str, alias: str, began: int) -> str | None:
    """The version that has the alias, if it is of a run that began later."""
    held = client.get_registered_model(name).aliases.get(alias)
    if held is None:
        return None
    held_began = str(client.get_model_version(name, held).tags.get(BEGAN, ""))
    return str(held) if held_began.isdecimal() and int(held_began) > began else None


def is_final(error: Exception) -> bool:
    """Whether MLflow's registry will always answer this way: it does not exist, or refuses the name or the user."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and str(error.error_code) not in LATER
