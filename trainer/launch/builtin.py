"""The launchers that launch._target_ can name: in_process, forkserver, local (see ``torchrun.py`` for torchrun)."""

from __future__ import annotations

from typing import Any

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import torchrun
from trainer.planning.launcher import Assignment, Launcher, Supervision


class InProcess(Launcher):
    """launch=in_process: the only worker runs in this process."""

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        if workers + others == 1:
            return []
        what = f"launch.nproc={config.launch.nproc}" if config.launch.nproc else "launch=in_process"
        return [
            UserError(what, f"launch=in_process is one process, and the run has {workers + others}", "launch=local")
        ]

    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        from trainer.launch.in_process import in_place

        return in_place(assignment)


class Forkserver(Launcher):
    """launch=forkserver: every process of this host is a child of a forkserver that has already imported torch."""

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        if torchrun.is_rank() or (config.plan and config.launch.nnodes > 1):  # it is not this host's forkserver
            return []
        from trainer.host import private

        try:
            private.check_sockets()
        except UserError as error:
            return [error]
        return []

    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        from trainer.launch.start import start_processes

        return start_processes(assignment, supervision)


class Local(Launcher):
    """launch=local: one worker alone runs in this process; several processes come from a forkserver."""

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        return Forkserver(**self.config).refuse(config, workers, others) if workers + others > 1 else []

    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        alone = len(assignment.plan.topology.processes) == 1 and not assignment.plan.topology.least_nnodes
        kind = InProcess if alone else Forkserver
        return kind(**self.config).start(assignment, supervision)
