"""The engine protocol: an engine starts one process, and returns a handle that the supervisor watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.host.notes_board import OwnBoard
from trainer.launch.meeting_place import MeetingPlace
from trainer.launch.started_process import Handle, Role
from trainer.strategies.seat import Address, Life


@dataclass(frozen=True)
class Start:
    """What an engine needs to start one process: its role and rank, its assignment, its log.

    Attributes:
        role, index: the role, and the number of the process among the role's processes of this host.
        payload: handed to the role's entry.
        place: where the run's processes meet. address: at which the process listens, if it is a server.
        life: this start of the process.
        launcher: id of the launcher's process; the process ends when the launcher does.
        environment: variables of the process.
        log: an existing file for the process's output. scratch: folder for its temporary files.
    """

    role: Role
    index: int
    payload: Any
    place: MeetingPlace
    address: Address
    life: Life
    launcher: int
    environment: Mapping[str, str]
    log: Path
    scratch: Path

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
