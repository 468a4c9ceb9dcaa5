"""Records where the run's processes are: each reports when it begins, and host 0's launcher writes it to plan.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from trainer.host import json_text
from trainer.host.files import if_the_disk_takes
from trainer.host.notes_board import Board
from trainer.planning.plan import Plan
from trainer.planning.processes import Process
from trainer.run_folder.json_files import leave

PROCESS, ENDPOINT = "process/{}/{}", "endpoint/{}/{}"
"""Notes of a process: what it is, and where it listens if it does."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for every process of a run."""
WHERE_SEVERAL = ("GLOO_SOCKET_IFNAME",)
"""Set where a launcher starts several processes."""
POLL_S = 0.5


@dataclass(frozen=True)
class ProcessReport:
    """What a process reports when it begins: process id, host address, environment variables, life."""

    pid: int
    host: str
    environment: Mapping[str, str]
    life: int = 0


def tell(board: Board, role: str, rank: int, host: str, life: int = 0) -> None:
    """Report on the board that this process has begun, and where it is.

    Args:
        host: its address.
        life: number of this start of it.
    """
    board.set(PROCESS.format(role, rank), json.dumps(asdict(ProcessReport(os.getpid(), host, environment(), life))))


def environment() -> dict[str, str]:
    """What a process reports of its environment for plan.json: the variables RANK, MASTER_ADDR and the like."""
    return {name: os.environ[name] for name in (*VARIABLES, *WHERE_SEVERAL) if name in os.environ}


def leave_plan(plan: Plan) -> None:
    """Write plan.json again, now that it is known where the processes are; nothing if it is not there."""
    if (path := plan.own_folder / "plan.json").is_file():
        leave(path, plan.as_dict(), private=True)


class ProcessReports:
    """Collects what the processes of a run report, into its plan.

    Args:
        plan: as before the start; one of another host than host 0 stays so.
        clock: seconds that only go forward.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.clock = plan, clock
        there = {} if plan.node_rank else {(p.role, p.rank): p for p in plan.processes}
        self.unreported, self.without_endpoint = dict(there), {key: p for key, p in there.items() if p.role == "server"}
        self.lives: dict[tuple[str, int], int] = {}
        """Of processes that were started again, the life that is to be told of."""
        self._polled, self._unwritten = clock(), False

    def again(self, role: str, rank: int, life: int) -> None:
        """Expect another report: the process (role, rank) has been restarted."""
        self.lives[role, rank] = life
        self.unreported |= {(p.role, p.rank): p for p in self.plan.processes if (p.role, p.rank) == (role, rank)}

    def poll(self, board: Board, now: bool = False) -> None:
        """Take in new reports, and write them to plan.json.

        Args:
            now: also if it was looked at a moment ago.
        """
        if not (self.unreported or self.without_endpoint or self._unwritten):
            return
        if self.clock() - self._polled < POLL_S and not now:
            return
        self._polled = self.clock()
        notes = self._noted(board, PROCESS, self.unreported)
        reports = {key: ProcessReport(**json_text.loads(note)) for key, note in notes.items()}
        reports = {key: report for key, report in reports.items() if report.life == self.lives.get(key, report.life)}
        endpoints = self._noted(board, ENDPOINT, self.without_endpoint)
        if reports or endpoints:
            self._take(reports, endpoints)
        if self._unwritten:
            with if_the_disk_takes():  # of a full disk the run tells, and this is tried again
                leave_plan(self.plan)
                self._unwritten = False

    def _take(self, reports: Mapping[tuple[str, int], ProcessReport], endpoints: Mapping[tuple[str, int], str]) -> None:
        """Into the plan."""
        self.unreported = {key: p for key, p in self.unreported.items() if key not in reports}
        self.without_endpoint = {key: p for key, p in self.without_endpoint.items() if key not in endpoints}
        processes = [
            _with(p, reports.get((p.role, p.rank)), endpoints.get((p.role, p.rank))) for p in self.plan.processes
        ]
        first = {role: dict(one.environment) for (role, rank), one in reports.items() if rank == 0}
        self.plan = replace(self.plan, processes=processes, environment={**self.plan.environment, **first})
        self._unwritten = True

    @staticmethod
    def _noted(board: Board, note: str, missing: Mapping[tuple[str, int], Process]) -> dict[tuple[str, int], str]:
        """The notes that have come."""
        found = [key for key in missing if board.check([note.format(*key)])]
        return {key: board.get(note.format(*key)).decode() for key in found}


def _with(process: Process, report: ProcessReport | None, endpoint: str | None) -> Process:
    """The process as it is; who does not listen is at its host's address."""
    if report is not None:
        process = replace(process, pid=report.pid, endpoint=process.endpoint or report.host)
    return process if endpoint is None else replace(process, endpoint=endpoint)
