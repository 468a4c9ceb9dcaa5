"""The meeting place of a run's processes: a folder on one host, or host 0's store between hosts."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from trainer.errors import RunFailed, first_line
from trainer.host.addresses import listening
from trainer.host.notes_board import FolderBoard, OwnBoard, SealedBoard
from trainer.host.patient_store import PatientStore
from trainer.launch.rendezvous import Rendezvous

BOARD, GROUP = "board", "group"
CONNECT_S = 300


@dataclass(frozen=True)
class MeetingPlace:
    """The address of the run's meeting place; the launcher passes it to its processes in memory.

    Attributes:
        secret: the run's, 32 bytes.
        folder: on one host, a private folder; empty: the run spans hosts.
        host, port: of host 0's store between hosts. name: of the store in messages. patience_s: longest wait for its
            answers.
    """

    secret: bytes = field(repr=False)
    folder: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    name: str = "the launcher's store"
    patience_s: float = CONNECT_S

    def make(self) -> None:
        """Make the folders of the meeting place, once, before the processes start."""
        if self.folder:
            Path(self.folder, BOARD).mkdir(mode=0o700)

    def open(self) -> tuple[OwnBoard, dist.Store]:
        """Open the run's board for notes, and the store in which torch's process groups meet.

        On one host the store is a file in the same folder: there is no port that another user could connect to.
        """
        if self.folder:
            return FolderBoard(Path(self.folder, BOARD)), dist.FileStore(str(Path(self.folder, GROUP)), -1)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=datetime.timedelta(seconds=CONNECT_S))
        return SealedBoard(PatientStore(store.clone(), self.name, self.patience_s), self.secret), store


def open_store(rendezvous: Rendezvous) -> dist.TCPStore:
    """Open host 0's TCPStore, bound to its address alone, or connect to it from another host.

    Raises:
        RunFailed: host 0 does not answer.
    """
    timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
    if not rendezvous.serves:
        try:
            return dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
        except dist.DistError as error:
            where = f"{rendezvous.where} within {rendezvous.timeout_s:g} s (launch.timeout_s)"
            alone = rendezvous.host.startswith("127.") and not rendezvous.labels
            hint = " (that is this host itself: give launch.master_addr)" if alone else ""
            raise RunFailed(f"{rendezvous.label(0)} did not answer at {where}{hint}: {first_line(error)}") from error
    try:
        return serve_store(rendezvous.host, rendezvous.port, timeout)
    except OSError as error:
        raise RunFailed(f"{rendezvous.label(0)} cannot listen at {rendezvous.where}: {error.strerror}") from error


def serve_store(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """Serve a TCPStore at one address of this host, where torch itself would listen at all; port 0: at a free one.

    Raises:
        OSError: the address is not this host's, or the port is in use.
    """
    serving = listening(host, port, backlog=512)
    port = serving.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=serving.detach()
    )
