"""The seat of a process: its role, rank and device, and how it reaches the other processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainer.host.notes_board import OwnBoard


@dataclass(frozen=True)
class Address:
    """How the processes of the run reach a server of this host.

    Attributes:
        secret: the run's, 32 bytes, known to its processes alone. host: the server listens at this address. port: 0: a
        free one. folder: a private folder for Unix sockets; empty: the run spans hosts, or the path is too long.
    """

    secret: bytes = field(default=b"", repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    folder: str = ""


@dataclass(frozen=True)
class Life:
    """This start of a process.

    Attributes:
        number: random; 0: none. returns: the process replaces one of its rank that has died while the others went on.
        pulse: file in which the process counts its updates for the launcher; empty: the launcher reads none.
    """

    number: int = 0
    returns: bool = False
    pulse: str = ""


@dataclass(frozen=True)
class Others:
    """What a worker knows of the other processes from the plan.

    Attributes:
        even: all workers have equally many samples in every update, and the loss is a mean over samples. servers:
        number of parameter servers. server_hosts: the host of each; empty: there is one host. by_host: messages name
        the hosts of workers. hang_timeout_s: ``launch.hang_timeout_s``; 0: there is none.
    """

    even: bool = True
    servers: int = 0
    server_hosts: tuple[int, ...] = ()
    by_host: bool = True
    hang_timeout_s: float = 0.0

    def server_name(self, number: int) -> str:
        """The name of a parameter server in messages, with its host if there are several."""
        return f"server {number}" + (f" (host {self.server_hosts[number]})" if self.server_hosts else "")


def _to_nobody(error: BaseException) -> None:
    """Send no failure: this process has no launcher."""


@dataclass(frozen=True)
class Seat:
    """The place of a process in the run: its role, rank, device, and how it reaches the others.

    Attributes:
        role, rank, size: the role, the number of the process within it over all hosts, and the role's processes.
        local_rank, local_size: the same on this host. device: e.g. ``cpu`` or ``cuda:0``. store: the run's board, on
        which its processes alone leave notes, such as endpoints. group_store: torch's, where process groups meet; None:
        there are no other processes. send_failure: sends the error with which this process ends to its launcher, at
        once, from any thread. The first one counts.
    """

    role: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    store: OwnBoard
    group_store: Store | None = None
    address: Address = field(default_factory=Address)
    life: Life = field(default_factory=Life)
    others: Others = field(default_factory=Others)
    send_failure: Callable[[BaseException], object] = field(default=_to_nobody, repr=False, compare=False)

    def names(self, ranks: Iterable[int]) -> list[str]:
        """The names of processes of this role in messages, with their hosts if there are several."""
        spread = self.others.by_host and self.size > self.local_size
        return [f"{self.role} {r}" + (f" (host {r // self.local_size})" if spread else "") for r in ranks]
