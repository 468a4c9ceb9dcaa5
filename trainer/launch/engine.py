"""The engine protocol: starts one process and returns a handle that the supervisor watches."""

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
        role, index: which of the role's processes of this host it is.
        payload: handed to its entry.
        place: where the run's processes meet; host: address on which a server of this host listens.
        launcher: number of the process that it ends with.
        sockets: folder for Unix sockets; empty: none.
        environment: its variables.
        log: an existing file, where all that it prints goes; scratch: the folder for its temporary files.
        pulse: file in which the launcher sees how far it is.
        port: where it listens; 0: a free one.
        life, returns: random number of this start; one of its rank has died, and the others go on.
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
    """Protocol of what starts processes; each process becomes a handle that the supervisor watches."""

    def prepare(self, scratch: Path) -> None:
        """Called once, before the first process is started.

        Args:
            scratch: a new folder for temporary files, for this user alone; it goes when all processes have ended.
        """

    can_restart: bool
    """It can start another process for a role and rank of which one has ended."""

    def begin(self, start: Start, board: OwnBoard) -> Handle:
        """Start a process and return its handle at once.

        Args:
            board: the run's, where processes can leave what they return.
        """
