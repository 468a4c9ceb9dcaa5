"""The engine protocol: an engine starts one process, and returns a handle that the supervisor watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.host.notes_board import OwnBoard
from trainer.launch.meeting_place import Place
from trainer.launch.started_process import Handle, Role


@dataclass(frozen=True)
class Start:
    """What an engine needs to start one process: its role and rank, its assignment, its log.

    Attributes:
        role, index: the role, and the number of the process among the role's processes of this host.
        payload: handed to the role's entry.
        place: where the run's processes meet. host: address at which a server of this host listens.
        launcher: id of the launcher's process; the process ends when the launcher does.
        sockets: folder for Unix sockets; empty: none.
        environment: variables of the process.
        log: an existing file for the process's output. scratch: folder for its temporary files.
        pulse: file in which the process counts its progress.
        port: at which it listens; 0: a free one.
        life: random number of this start. returns: it replaces a dead process of its rank, and the others go on.
    """

    role: Role
    index: int
    payload: Any
    place: Place
    host: str
    launcher: int
    sockets: str
    environment: Mapping[str, str]
    log: Path
    scratch: Path
    pulse: str = ""
    port: int = 0
    life: int = 0
    returns: bool = False

    @property
    def rank(self) -> int:
        """The process's rank within its role, over all hosts."""
        return self.role.first_rank + self.index


class Engine(Protocol):
    """Protocol of an engine, which starts processes."""

    def prepare(self, scratch: Path) -> None:
        """Called once, before the first process is started.

        Args:
            scratch: a new private folder for temporary files, removed when all processes have ended.
        """

    can_restart: bool
    """Whether a second process can be started for a role and rank whose process has ended."""

    def begin(self, start: Start, board: OwnBoard) -> Handle:
        """Start a process and return its handle at once.

        Args:
            board: the run's board, where processes can leave their results.
        """
