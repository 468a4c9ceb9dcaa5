"""A sweep that is checked: its jobs, how far it is, and what its table says of a job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import sweep_table
from trainer.cli.commands import leave_hydra_files
from trainer.cli.sweep_objective import Objective, measured, objectives
from trainer.cli.sweep_points import SweepJob
from trainer.config.keys import key_of
from trainer.config.redact import text
from trainer.job.claim_folder import claim, held
from trainer.job.prepared_data import of_the_same_data
from trainer.job.ready import Ready
from trainer.job.result import Result
from trainer.planning.find_checkpoint import AUTO
from trainer.run_folder import tracking_file

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config.schema.run import SweepConfig
    from trainer.launch.engines.contract import Living, Submitter
    from trainer.service.pool import Pool
    from trainer.tracking.client import RecorderProcess

OPEN_S = 60.0
"""Longest wait for the sweep's run at its trackers, before the jobs are submitted to an engine."""


@dataclass(frozen=True)
class Next:
    """A job to start now: its number in the sweep, its overrides, and those that are shown."""

    number: int
    words: tuple[str, ...]
    shown: tuple[str, ...]
    subdir: str


@dataclass
class SweepState:
    """A sweep that has passed every check: its jobs, and what has become of them.

    Attributes:
        master: the config that Hydra composed for all jobs.
        overrides: as typed. flags: before them in the command that repeats the sweep.
        folder: of the jobs' folders.
        jobs: the overrides of each job. points: the checked jobs.
        swept: keys with several values.
        ended: the jobs so far, by number. launcher: submits all jobs as one job of an engine; None: they run here.
        space: of a search, the values of each key as a text.
        living: the job of an earlier command that is followed in place of a new one.
        pool: processes for jobs side by side that have been started beside the checks.
    """

    master: DictConfig
    overrides: list[str]
    flags: Sequence[str]
    folder: Path
    jobs: list[list[str]]
    points: list[SweepJob]
    swept: set[str]
    tracker: RecorderProcess | None = None
    ended: dict[int, sweep_table.Row] = field(default_factory=dict)
    launcher: Submitter | None = None
    living: Living | None = None
    config_name: str = "config"
    space: list[str] = field(default_factory=list)
    pool: Pool | None = None

    @property
    def config(self) -> SweepConfig:
        """The keys of ``sweep``."""
        return self.points[0].ready.checked.config.sweep

    @property
    def runs_beside(self) -> bool:
        """Whether the jobs run in processes of their own."""
        return self.config.parallel not in (None, 1)

    @property
    def subdirs(self) -> list[str]:
        """The jobs' folders, relative to the sweep's."""
        return [point.subdir for point in self.points]

    def begins(self, job: Next) -> None:
        """Note that a job begins."""

    @property
    def at_a_time(self) -> int | None:
        """How many jobs run at the same time; None: as many as there are slots for."""
        return None if self.config.parallel in (None, "auto") else int(self.config.parallel)

    @property
    def goes_on(self) -> bool:
        """Whether this command goes on with the sweep in this folder."""
        return self.living is not None or any(one.ready.checked.config.resume.path == AUTO for one in self.points)

    def wait_for_trackers(self) -> None:
        """Wait until the sweep's own runs are open: the jobs, in other processes, look up their ids."""
        until = time.monotonic() + OPEN_S
        while self.tracker is not None and time.monotonic() < until:
            there = tracking_file.read(self.folder)
            if there is not None and all(one.id or one.error for one in there.trackers.values()) and there.trackers:
                return
            time.sleep(OPEN_S / 300)

    def shown(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides in which a job differs from others, without secrets."""
        return tuple(text(o) for o in overrides if key_of(o) in self.swept) or tuple(map(text, overrides))

    def row(self, shown: tuple[str, ...], result: Result) -> sweep_table.Row:
        """The row of a job in the table, with the best values of the objectives."""
        wanted = self.objectives
        values = measured(Path(result.run_dir), wanted) if result.run_dir else {}
        own = {one.metric: result.best[one.metric] for one in wanted if one.metric in result.best}
        return sweep_table.Row(shown, result, wanted[0].metric, wanted, {**values, **own})

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What the jobs are compared by."""
        known = self.points[0].ready.plan.objective
        return objectives(self.config.objective, known.best, known.lower)


@contextlib.contextmanager
def in_its_folder(point: SweepJob, ready: Ready, folder: Path) -> Iterator[Ready]:
    """Context manager: a job of a sweep has its folder for itself, in which Hydra's files lie; yields the job.

    Args:
        folder: of the sweep.
    """
    where = folder / point.subdir
    ready = of_the_same_data(ready)
    claim(where, chosen=True)
    with held(ready):
        leave_hydra_files(point.config, where)
        yield ready
