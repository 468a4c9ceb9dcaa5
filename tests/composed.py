"""A command line as far as a run comes before its folder is made: composed, and checked."""

from __future__ import annotations

from typing import Any

from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.job.check import get_ready
from trainer.job.ready import Ready


def composed(*typed: str, config_dir: str | None = None) -> dict[str, Any]:
    """The config of these overrides, as plain data; with the user's folder of configs."""
    with hydra_app(config_dir) as app:
        return commands.plain(compose(app, list(typed)))


def ready(*typed: str, run_dir: str = "somewhere", config_dir: str | None = None) -> Ready:
    """The checked run of these overrides, which is not started."""
    return get_ready(composed(*typed, config_dir=config_dir), commands.typed_keys(typed), run_dir)
