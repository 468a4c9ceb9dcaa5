"""What a launcher starts: the roles of a run on this host, and the handle of a started process."""

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
    """Protocol of a started process, of any engine, as the supervisor watches it."""

    log: Path
    """File of the process's output."""
    returned: bool
    """The process has sent its entry's result."""
    value: Any
    """The entry's result."""
    failure: Failure | None
    """The process's report of its failure; None: there is none."""

    @property
    def exitcode(self) -> int | None:
        """The process's exit code: None while it runs, negative for a signal."""

    @property
    def well(self) -> bool:
        """Whether the process has ended successfully."""

    def poll(self) -> None:
        """Read the process's news, without waiting."""

    def signs(self) -> list[Any]:
        """Objects to wait for, which become ready when there is something to read."""

    def dismiss(self) -> None:
        """Let the process end."""

    def dump(self) -> bool:
        """Have the process write its Python stacks into its log; returns whether it can be asked to."""

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it still exists."""

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, at most ``seconds``."""


@dataclass(frozen=True)
class StartedProcess:
    """A started process: its role, rank and handle.

    Attributes:
        life: random number of this start of the process; 0: it has none.
        returns: it replaces a process that died while the others went on.
    """

    role: Role
    rank: int
    handle: Handle
    life: int = 0
    returns: bool = False

    def __str__(self) -> str:
        return f"{self.role.name} {self.rank}"
