"""The launcher contract: what ``launch._target_`` names turns a plan into processes and runs them to their end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.planning.assignment import Assignment


class Launcher(ABC):
    """Base class of launchers: turns the plan into this host's processes, and runs them to their end.

    A launcher is made when a config is checked, so that its module imports nothing heavy: what it needs at the start it
    imports in ``start``. One that starts a command for each process is a :class:`trainer.launch.tasks.TaskLauncher`.

    Args:
        config: the keys of the ``launch`` node, without ``_target_``.

    Attributes:
        options: the keys that the schema knows; keys of one's own are in ``config``.
    """

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.options = typed(LaunchConfig, config)

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        """Return every reason why this launcher cannot start this many workers and other processes over all hosts."""
        return []

    @abstractmethod
    def start(self, assignment: Assignment) -> dict[str, Any]:
        """Run this host's processes to their end; returns what the first worker here returned.

        Raises:
            RunFailed: a process died that the others cannot do without; all others are ended.
            Interrupted: the run was ended from outside.
        """


def launcher_of(config: RunConfig) -> Launcher:
    """Instantiate the launcher that ``launch._target_`` names.

    Raises:
        UserError: it is no launcher, or does not take its keys.
    """
    made: Launcher = call_target(config.node("launch"), "launch", kind=Launcher)
    return made
