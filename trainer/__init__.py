"""Declarative, YAML-driven training for PyTorch: ``python -m trainer +recipe=NAME`` or ``trainer.run([...])``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.version import __version__

if TYPE_CHECKING:
    from trainer.cli.client import Client
    from trainer.job.result import Result

__all__ = ["Client", "__version__", "run"]


def __getattr__(name: str) -> object:
    """``trainer.Client``, which is imported where it is used."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.cli import client

    return client.Client


def run(overrides: list[str]) -> Result:
    """``trainer.run``: train from a Python program as ``python -m trainer OVERRIDES`` does.

    Args:
        overrides: Hydra overrides, e.g. ``["+recipe=digits_lenet", "optimizer.lr=0.1"]``.

    Returns:
        The run's result: status, run folder, MLflow run id, final and best metrics. A sweep (``"-m"`` first) is for
        the command line.

    Raises:
        UserError: the overrides ask for something that cannot be; nothing was started or written.
        RunFailed: the run was started and broke.
    """
    from trainer.cli.commands import run as run_service

    return run_service(overrides)
