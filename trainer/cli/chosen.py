"""What a command line asks for: overrides, or ``eval RUN`` and ``predict RUN`` with the config of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VERBS = {"eval": "RUN [DATA]", "predict": "RUN INPUT"}


@dataclass(frozen=True)
class Chosen:
    """What Hydra composes: the primary config, the overrides, and the words before these in the command that repeats
    it."""

    config_name: str
    overrides: list[str]
    flags: list[str]
    verb: str = ""


@contextlib.contextmanager
def chosen(words: Sequence[str], config_name: str | None = None, flags: Sequence[str] = ()) -> Iterator[Chosen]:
    """Context manager: yields what these words of a command line ask for. The run's own modules can be imported inside.

    Raises:
        UserError: RUN is no run, has no weights or no config, or its data are elsewhere.
    """
    if not any(word in VERBS for word in words):
        yield Chosen(config_name or "config", list(words), list(flags))
        return
    from trainer.cli.saved_run import chosen_of_run

    with chosen_of_run(words, config_name, flags) as found:
        yield found
