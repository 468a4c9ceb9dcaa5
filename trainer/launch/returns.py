"""Starts another process in the place of a worker that has died, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.errors import Died, RunFailed, first_line
from trainer.host import pulse
from trainer.launch.engine import Start
from trainer.launch.supervisor import Handle, StartedProcess
from trainer.launch.whereabouts import Whereabouts
from trainer.strategies.stopping import new_life


class Returns:
    """The workers of a run that come back.

    Args:
        most: so many may.
        starts: what each process was told, by name.
        begin: starts a process.
        members: the processes of the run; those that are started here join them.
        noted: takes down where the processes are.
    """

    def __init__(
        self,
        most: int,
        starts: dict[str, Start],
        begin: Callable[[Start], Handle],
        members: list[StartedProcess],
        noted: Whereabouts | None = None,
    ) -> None:
        self.noted = noted
        self.most, self.starts, self.begin, self.members = most, starts, begin, members
        self.deaths: list[tuple[str, int]] = []
        self.told: list[str] = []

    def again(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        """Start another process, unless that one has told an error of its own, too many have died, or it died twice after the
        same update."""
        start = self.starts[str(member)]
        this = str(member), pulse.look(Path(start.pulse)).update
        if not isinstance(death, Died) or len(self.told) >= self.most or this in self.deaths[-1:]:
            return None
        self.deaths.append(this)
        self.told.append(first_line(death))
        which = f"restart {len(self.told)} of {self.most}"
        print(f"\nATTENTION: {death}\n{which}: {member} is started again; the others go on meanwhile\n", flush=True)
        return self._started(member, replace(start, life=new_life(), returns=True))

    def _started(self, member: StartedProcess, start: Start) -> StartedProcess:
        pulse.make(Path(start.pulse))
        self.starts[str(member)] = start
        self.members.append(StartedProcess(member.role, member.rank, self.begin(start), start.life, True))
        if self.noted is not None:
            self.noted.again(member.role.name, member.rank, start.life)
        return self.members[-1]
