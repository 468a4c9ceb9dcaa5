"""The reports of a run's processes about themselves, which host 0's launcher writes to plan.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from trainer.host import json_text
from trainer.host.files import if_the_disk_takes
from trainer.host.notes_board import Board
from trainer.planning.plan import Plan
from trainer.planning.processes import Process
from trainer.run_folder.json_files import leave

PROCESS, ENDPOINT = "process/{}/{}", "endpoint/{}/{}"
"""Keys of a process's notes: its report, and the endpoint at which it listens."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for every process of a run."""
WHERE_SEVERAL = ("GLOO_SOCKET_IFNAME",)
"""Set where a launcher starts several processes."""
POLL_S = 0.5


@dataclass(frozen=True)
class ProcessReport:
    """The report of a process that begins: process id, host address, environment variables, life."""

    pid: int
    host: str
    environment: Mapping[str, str]
    life: int = 0


def report_start(board: Board, role: str, rank: int, host: str, life: int = 0) -> None:
    """Leave this process's report on the board.

    Args:
        host: address of this host. life: random number of this start of the process.
    """
    board.set(PROCESS.format(role, rank), json.dumps(asdict(ProcessReport(os.getpid(), host, environment(), life))))


def environment() -> dict[str, str]:
    """The variables of this process that plan.json shows: RANK, MASTER_ADDR and the like."""
    return {name: os.environ[name] for name in (*VARIABLES, *WHERE_SEVERAL) if name in os.environ}


def leave_plan(plan: Plan) -> None:
    """Write plan.json again with the reported processes, if the run has one."""
    if (path := plan.own_folder / "plan.json").is_file():
        leave(path, plan.as_dict(), private=True)


class ProcessReports:
    """Collects the reports of a run's processes in its plan.

    Args:
        plan: before the start. Host 0 collects; on other hosts the plan stays as it is.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        there = {} if plan.topology.node_rank else {(p.role, p.rank): p for p in plan.topology.processes}
        self.unreported, self.without_endpoint = dict(there), {key: p for key, p in there.items() if p.role == "server"}
        self.lives: dict[tuple[str, int], int] = {}
        """The life of each restarted process whose report is expected."""
        self._polled, self._unwritten = time.monotonic(), False

    def expect(self, role: str, rank: int, life: int) -> None:
        """Expect another report: the process (role, rank) has been restarted."""
        self.lives[role, rank] = life
        self.unreported |= {
            (p.role, p.rank): p for p in self.plan.topology.processes if (p.role, p.rank) == (role, rank)
        }

    def poll(self, board: Board, now: bool = False) -> None:
        """Read new reports, and write them to plan.json.

        Args:
            now: read them even if they were read a moment ago.
        """
        if not (self.unreported or self.without_endpoint or self._unwritten):
            return
        if time.monotonic() - self._polled < POLL_S and not now:
            return
        self._polled = time.monotonic()
        notes = self._noted(board, PROCESS, self.unreported)
        reports = {key: ProcessReport(**json_text.loads(note)) for key, note in notes.items()}
        reports = {key: report for key, report in reports.items() if report.life == self.lives.get(key, report.life)}
        endpoints = self._noted(board, ENDPOINT, self.without_endpoint)
        if reports or endpoints:
            self._take(reports, endpoints)
        if self._unwritten:
            with if_the_disk_takes():  # the run reports a full disk; the next poll tries again
                leave_plan(self.plan)
                self._unwritten = False

    def _take(self, reports: Mapping[tuple[str, int], ProcessReport], endpoints: Mapping[tuple[str, int], str]) -> None:
        """Enter reports and endpoints into the plan."""
        self.unreported = {key: p for key, p in self.unreported.items() if key not in reports}
        self.without_endpoint = {key: p for key, p in self.without_endpoint.items() if key not in endpoints}
        processes = [
            _with(p, reports.get((p.role, p.rank)), endpoints.get((p.role, p.rank)))
            for p in self.plan.topology.processes
        ]
        first = {role: dict(one.environment) for (role, rank), one in reports.items() if rank == 0}
        environment = {**self.plan.topology.environment, **first}
        self.plan = self.plan.changed(topology={"processes": processes, "environment": environment})
        self._unwritten = True

    @staticmethod
    def _noted(board: Board, note: str, missing: Mapping[tuple[str, int], Process]) -> dict[tuple[str, int], str]:
        """The notes that have come, by role and rank."""
        found = [key for key in missing if board.check([note.format(*key)])]
        return {key: board.get(note.format(*key)).decode() for key in found}


def _with(process: Process, report: ProcessReport | None, endpoint: str | None) -> Process:
    """The process with its report; a process that does not listen gets its host's address as endpoint."""
    if report is not None:
        process = replace(process, pid=report.pid, endpoint=process.endpoint or report.host)
    return process if endpoint is None else replace(process, endpoint=endpoint)
