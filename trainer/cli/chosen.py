"""What a command line asks for: overrides alone, or ``eval RUN`` and ``predict RUN`` with the config of a run."""

from __future__ import annotations

from dataclasses import dataclass

VERBS = {"eval": "RUN [DATA]", "predict": "RUN INPUT"}


@dataclass(frozen=True)
class Chosen:
    """What a command line asks for.

    Attributes:
        config_name: the primary config, which Hydra composes with the ``overrides``.
        flags: words before the overrides in the command that repeats the run.
        verb: ``eval`` or ``predict``; empty for a command of overrides alone.
    """

    config_name: str
    overrides: list[str]
    flags: list[str]
    verb: str = ""
