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
from trainer.planning.deaths import Deaths
from trainer.strategies.lost_workers import new_life


class ProcessRestarts:
    """Restarts single processes of a run that have died, while the others go on.

    Args:
        deaths: counts them with all others of the run; None: no process is restarted.
        starts: what each process was told, by name.
        begin: starts a process.
        members: the processes of the run; those that are started here join them.
        noted: takes down where the processes are.
    """

    def __init__(
        self,
        deaths: Deaths | None,
        starts: dict[str, Start],
        begin: Callable[[Start], Handle],
        members: list[StartedProcess],
        noted: ProcessReports | None = None,
    ) -> None:
        self.noted = noted
        self.deaths, self.starts, self.begin, self.members = deaths, starts, begin, members
        self.before: tuple[str, int] | None = None
        """Who was restarted last, and after which update it had died."""

    def again(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        """Restart a process that has died, and return it; None if it must not be restarted. That is if it reported an
        error of its own (another one than that it has missed the checkpoint at which it was to come back), too many
        have died, or it died twice after the same update.

        It is dead for certain: where its forkserver was killed, it only seems so, and goes on.
        """
        end([member.handle], END_S)
        start = self.starts[str(member)]
        this = str(member), pulse.read(Path(start.pulse)).update
        if not (member.role.again and isinstance(death, Died) and this != self.before):
            return None
        if self.deaths is None or self.deaths.left() <= 0:
            return None
        self.before = this
        self.deaths.returned.append(first_line(death))
        how = f"{self.deaths.count()}: {member} is started again; the others go on meanwhile"
        print(f"\nATTENTION: {death}\n{how}\n", flush=True)
        return self._started(member, replace(start, life=new_life(), returns=True))

    def _started(self, member: StartedProcess, start: Start) -> StartedProcess:
        pulse.make(Path(start.pulse))
        self.starts[str(member)] = start
        self.members.append(StartedProcess(member.role, member.rank, self.begin(start), start.life, True))
        if self.noted is not None:
            self.noted.again(member.role.name, member.rank, start.life)
        return self.members[-1]
