"""Restarts a worker that has died, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.errors import Died, RunFailed, first_line
from trainer.host import pulse
from trainer.launch.engine import Start
from trainer.launch.process_reports import ProcessReports
from trainer.launch.started_process import Handle, StartedProcess
from trainer.launch.supervisor import END_S, end
from trainer.planning.launcher import Deaths
from trainer.strategies.lost_workers import new_life


class ProcessRestarts:
    """Restarts single processes of a run that have died, while the others go on.

    Args:
        deaths: counts the run's deaths; None: no process is restarted.
        starts: the :class:`Start` of each process, by name.
        begin: starts a process.
        members: the processes of this host; a restarted process joins them.
        reports: expects the report of a restarted process.
    """

    def __init__(
        self,
        deaths: Deaths | None,
        starts: dict[str, Start],
        begin: Callable[[Start], Handle],
        members: list[StartedProcess],
        reports: ProcessReports | None = None,
    ) -> None:
        self.reports = reports
        self.deaths, self.starts, self.begin, self.members = deaths, starts, begin, members
        self.before: tuple[str, int] | None = None
        """Name of the process that was restarted last, and the update after which it had died."""

    def restart(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        """Restart a process that has died, and return it; None if it must not be restarted.

        It must not if it reported an error of its own (except that it missed the checkpoint at which it was to rejoin),
        if too many processes have died, or if it died twice after the same update.

        The process is killed first: if its forkserver was killed, it only seems dead, and still runs.
        """
        end([member.handle], END_S)
        start = self.starts[str(member)]
        this = str(member), pulse.read(Path(start.life.pulse)).update
        if not (member.role.restartable and isinstance(death, Died) and this != self.before):
            return None
        if self.deaths is None or self.deaths.left() <= 0:
            return None
        self.before = this
        self.deaths.returned.append(first_line(death))
        how = f"{self.deaths.count()}: {member} is started again; the others go on meanwhile"
        print(f"\nATTENTION: {death}\n{how}\n", flush=True)
        return self._started(member, replace(start, life=replace(start.life, number=new_life(), returns=True)))

    def _started(self, member: StartedProcess, start: Start) -> StartedProcess:
        pulse.make(Path(start.life.pulse))
        self.starts[str(member)] = start
        self.members.append(StartedProcess(member.role, member.rank, self.begin(start), start.life.number, True))
        if self.reports is not None:
            self.reports.expect(member.role.name, member.rank, start.life.number)
        return self.members[-1]
