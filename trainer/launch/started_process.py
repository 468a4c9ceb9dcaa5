"""What a launcher starts: the roles of a run on this host, and processes as those see them who watch them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.launch.process import Failure


@dataclass(frozen=True)
class Role:
    """The processes of one role on this host: their number, ranks and entry function.

    Attributes:
        name: ``worker`` or ``server``. size: processes of the role over all hosts; ``first_rank`` and ``here``: this
        host's. entry: ``module:function`` called as ``entry(seat, payload)`` in each process. devices: one per process
        here. apart: one of its processes may die and the others go on. restartable: a dead one is replaced, while the
        others go on. ports: where each listens; empty: at free ones.
    """

    name: str
    size: int
    entry: str
    devices: Sequence[str]
    first_rank: int = 0
    apart: bool = False
    restartable: bool = False
    ports: Sequence[int] = ()

    @property
    def here(self) -> int:
        """The number of processes of this role on this host."""
        return len(self.devices)


class Handle(Protocol):
    """Protocol of a started process as the supervisor sees it, whatever engine has started it."""

    log: Path
    """What the process printed."""
    returned: bool
    """The process has sent what its entry returned."""
    value: Any
    """What its entry returned."""
    failure: Failure | None
    """Why it failed, in its own words; None: it has not said."""

    @property
    def exitcode(self) -> int | None:
        """The process's exit code: None while it runs, negative for a signal."""

    @property
    def well(self) -> bool:
        """Whether the process has ended successfully."""

    def poll(self) -> None:
        """Read what the process has sent."""

    def signs(self) -> list[Any]:
        """Objects to wait for, which become ready when there is something to read."""

    def dismiss(self) -> None:
        """Let the process end: nobody needs it any more."""

    def dump(self) -> bool:
        """Have the process write its Python stacks into its log; returns whether it can be asked to."""

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it still exists."""

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, at most ``seconds``."""


@dataclass(frozen=True)
class StartedProcess:
    """A started process: its role, rank and handle. ``life``: the random number of this life, 0 if it has none.
    ``returns``: it replaces one that has died while the others go on."""

    role: Role
    rank: int
    handle: Handle
    life: int = 0
    returns: bool = False

    def __str__(self) -> str:
        return f"{self.role.name} {self.rank}"
