"""Runs a sweep: checks all points, runs the jobs one by one, and prints a table of their results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import compose, sweep_report, sweep_table, sweep_tracking
from trainer.cli.arguments import typed_keys
from trainer.cli.commands import check_same_folder, leave_hydra_files, recorded_by, show_only, submitter_of
from trainer.cli.compose import plain
from trainer.cli.explain import sentences
from trainer.cli.last_lines import how_to_go_on, how_to_resume, say_broken
from trainer.cli.sweep_composing import compose_sweep
from trainer.cli.sweep_engine import SUBMITTED, cancelled_while_held, of_engine
from trainer.cli.sweep_objective import Objective, measured, objectives
from trainer.cli.sweep_points import SweepJob, check_not_half_done, check_points, expand, swept_keys
from trainer.config.keys import key_of
from trainer.config.redact import command, text
from trainer.config.schema.run import MLFLOW
from trainer.errors import (
    BY_CTRL_C,
    NOTHING_NEW,
    PREEMPTED,
    PRUNED,
    AskedToLeave,
    Interrupted,
    RunFailed,
    RunPreempted,
    UserError,
)
from trainer.host import early_signals
from trainer.host.files import start_empty
from trainer.host.signals import termination_raises, undisturbed
from trainer.host.symlink_checks import check_sweep_folder
from trainer.job.check import get_ready
from trainer.job.claim_folder import claim, held
from trainer.job.closing import Closing
from trainer.job.job import execute
from trainer.job.prepared_data import of_the_same_data
from trainer.job.ready import Ready
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import ENGINE
from trainer.launch.engines.engine_folder import SUBMITTED_JOB, unmade_if_refused
from trainer.planning.find_checkpoint import AUTO
from trainer.planning.launcher import start_here
from trainer.planning.tracking_store import try_tracking
from trainer.run_folder import tracking_file
from trainer.run_folder.reset_files import POINTS
from trainer.terminal.screen import Screen, say
from trainer.tracking.client import tracking
from trainer.tracking.contract import STILL_RUNNING

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.cli.sweep_parallel import Next
    from trainer.config.schema.run import SweepConfig
    from trainer.launch.engines.contract import Handle, Living, Submitter
    from trainer.launch.engines.contract import Job as EngineJob
    from trainer.tracking.client import RecorderProcess

    Submitted = tuple[EngineJob, Handle]

SWEEP_DIR = "hydra.sweep.dir"
OPEN_S = 60.0
"""Longest wait for the sweep's run at its trackers, before the jobs are submitted to an engine."""


def sweep(app: Hydra, overrides: list[str], config_name: str, flags: Sequence[str] = ()) -> list[Result]:
    """Run every point of a sweep, each in its own folder and MLflow run under one parent run.

    All points are checked before the first one starts. A failed job is recorded, and the others run.
    """
    if any(key_of(o) == "sweep.resume" and o.endswith("=true") for o in overrides):
        overrides = [*overrides, "resume=auto"]
    checked = _check(app, overrides, config_name, flags)
    first = checked.points[0]
    if first.ready.checked.config.plan:
        return [show_only(point.ready) for point in checked.points]
    checked.launcher = submitter_of(first.config)
    if checked.launcher is not None:
        text_of_job = checked.launcher.render(
            checked.engine_job(checked.launcher)
        )  # refused before anything is written
        if checked.launcher.options.dry_run:
            sys.stdout.write(text_of_job)
            return [Result("planned", str(checked.folder / point.subdir)) for point in checked.points]
    return checked.run()


def _check(app: Hydra, overrides: list[str], config_name: str, flags: Sequence[str]) -> Sweep:
    """Compose a sweep and check its folder and all its points, without starting anything.

    Raises:
        UserError: the sweep cannot run.
    """
    master = compose_sweep(app, overrides, config_name)
    with sentences(app, overrides, config_name):
        folder = compose.named_folder(master, "hydra.sweep.dir")
    check_same_folder(master, "hydra.sweep.dir", folder)
    living = _living(master, folder, [*flags, *overrides])
    if master.sweep.search is not None:
        from trainer.cli.sweep_of_search import checked

        return checked(app, master, overrides, flags, folder, config_name)
    jobs = expand(master)
    points = check_points(app, master, jobs, as_new=living is not None)
    if living is None and not master.get("plan"):
        check_not_half_done(points, folder)
    check_sweep_folder(folder, [folder / point.subdir for point in points], master.hydra.output_subdir)
    return Sweep(
        master, overrides, flags, folder, jobs, points, swept_keys(master), living=living, config_name=config_name
    )


def _living(master: DictConfig, folder: Path, words: Sequence[str]) -> Living | None:
    """The array of an engine that this command follows in place of a new one.

    Raises:
        UserError: another job of an engine lives in the sweep's folder: both would write the same files.
    """
    found = {path.parent for path in folder.glob(f"**/{ENGINE}/{SUBMITTED_JOB}")} - {folder / ENGINE}
    if master.get("plan") or (launcher := submitter_of(master)) is None or launcher.options.dry_run:
        return None
    from trainer.cli.submit import living_job

    return living_job(launcher, [folder / ENGINE, *sorted(found)], SWEEP_DIR, words)


@dataclass
class Sweep:
    """A sweep that has passed every check and can run.

    Attributes:
        master: the config that Hydra composed for all jobs.
        overrides: as typed. flags: before them in the command that repeats the sweep.
        folder: of the jobs' folders.
        jobs: the overrides of each job. points: the checked jobs.
        swept: keys with several values.
        ended: the jobs so far, by number. launcher: submits all jobs as one job of an engine; None: they run here.
        space: of a search, the values of each key as a text.
        living: the job of an earlier command that is followed in place of a new one.
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

    def run(self) -> list[Result]:
        """Run all jobs of the sweep; then, even after an error, print the table and close the sweep's MLflow run.

        Raises:
            UserError: an engine refuses the jobs; then nothing is left of the sweep.
        """
        from trainer.tracking.describe import secrets_of

        first = self.points[0].ready
        away = try_tracking(first.checked.config, first.plan)
        with unmade_if_refused([self.folder]):
            self.folder = claim(self.folder, not compose.named_by_time(self.master, SWEEP_DIR), SWEEP_DIR)
            submitted = None if self.launcher is None else self._submit(self.launcher)
        with cancelled_while_held(submitted), tracking(recorded_by(first.checked.config)) as self.tracker:
            compose.write_config(self.folder / "multirun.yaml", self.master)
            if not self.goes_on:
                start_empty(self.folder / POINTS)
            if self.tracker is not None:
                if away:
                    self.tracker.mark_away(MLFLOW, away)
                self.tracker.open(self.folder, sweep_tracking.described(self), secrets_of(first.checked.config))
            status = "KILLED"
            try:
                with termination_raises(lambda: True):  # between two jobs, which handle signals themselves
                    early_signals.job_begins()
                    self._run_jobs(submitted)
                statuses = {job.result.status for job in self.ended.values()}
                status = "FINISHED" if statuses <= {"done", PRUNED} else "FAILED"
                if SUBMITTED in statuses:
                    status = STILL_RUNNING
            finally:
                with undisturbed():
                    self._close(status)
        return [job.result for job in self.ended.values()]

    @property
    def goes_on(self) -> bool:
        """Whether this command goes on with the sweep in this folder."""
        return self.living is not None or any(one.ready.checked.config.resume.path == AUTO for one in self.points)

    def _run_jobs(self, submitted: Submitted | None) -> None:
        try:
            if self.launcher is not None:
                self._follow(self.launcher, submitted)
                return
            if self.runs_beside:
                self.run_parallel()
                return
            for number, point in enumerate(self.points):
                if not self._is_over(number, point) and self._job(number, point) == "failed" == self.config.on_error:
                    return
        except AskedToLeave as error:
            raise RunPreempted(f"{error} between two jobs: those after it were not started") from None
        except KeyboardInterrupt:
            raise Interrupted(BY_CTRL_C) from None

    def _submit(self, launcher: Submitter) -> Submitted | None:
        """Submit all jobs as one job of an engine, which is held until the sweep has its runs at the trackers.

        Returns:
            None where no job is left to be done.
        """
        from trainer.cli.submit import handed_over
        from trainer.launch.engines.submission import submitting

        here, nothing = submitting(self.folder / ENGINE, SWEEP_DIR), contextlib.nullcontext()
        with here if self.living is None else nothing:
            self.living = self.living or _living(self.master, self.folder, [*self.flags, *self.overrides])
            if not (job := self.engine_job(launcher)).points:
                return None
            return job, handed_over(job, launcher, self.points[0].ready.checked.config, self.living)

    def _follow(self, launcher: Submitter, submitted: Submitted | None) -> None:
        """Let the jobs of an engine start, and follow them. Jobs that fail are recorded."""
        from trainer.cli.submit import Commands, followed, released

        commands, status = Commands.of([*self.flags, *self.overrides], SWEEP_DIR, self.folder), "failed"
        try:
            if submitted is not None:
                job, handle = submitted
                self.wait_for_trackers()
                released(handle, job)
                is_over = self.living is not None and self.living.is_over
                status = status if followed(handle, job, launcher, commands, is_over) else SUBMITTED
        except RunFailed as error:
            print(error, flush=True)
        except Interrupted as error:
            status = PREEMPTED if isinstance(error, RunPreempted) else "killed"
            raise
        finally:
            for number, point in enumerate(self.points):
                self._end(number, point.overrides, of_engine(self.folder / point.subdir, status))

    def wait_for_trackers(self) -> None:
        """Wait until the sweep's own runs are open: the jobs, in other processes, look up their ids."""
        until = time.monotonic() + OPEN_S
        while self.tracker is not None and time.monotonic() < until:
            there = tracking_file.read(self.folder)
            if there is not None and all(one.id or one.error for one in there.trackers.values()) and there.trackers:
                return
            time.sleep(OPEN_S / 300)

    def engine_job(self, launcher: Submitter) -> EngineJob:
        """The job of an engine that runs all jobs of the sweep."""
        from trainer.cli.submit import copies_of, job_of
        from trainer.launch.engines.contract import Point as Element

        checked, elements, numbers = self.points[0].ready.checked, [], []
        whole = compose.names_whole(self.master, "hydra.sweep.dir")
        job = job_of(checked, self.folder, [*self.flags, *self.overrides], launcher, whole)
        if self.living is not None:
            known = self.living.points
            return replace(job, points=tuple(known.values()), numbers=tuple(known))
        for number, point in enumerate(self.points):
            folder = self.folder / point.subdir
            if _is_done(point.ready, folder):
                continue
            numbers.append(number)
            copies = copies_of(point.ready.checked.config, folder, whole) if job.copies else ""
            words = (*job.words[: len(job.words) - len(self.overrides)], *point.overrides)
            frozen = compose.frozen(point.config) if launcher.freezes else ""
            elements.append(Element(words, folder, command(self.shown(point.overrides)), copies, frozen))
        swept, parallel = tuple(sorted(self.swept)), self.at_a_time or 0
        some = tuple(numbers) if len(numbers) < len(self.points) else ()
        held = bool(recorded_by(checked.config))
        return replace(job, points=tuple(elements), numbers=some, swept=swept, parallel=parallel, held=held)

    def run_parallel(self) -> None:
        """Run the jobs that are not over side by side."""
        from trainer.cli.sweep_parallel import EachOnce, Parallel, of_host

        left = [number for number, point in enumerate(self.points) if not self._is_over(number, point)]
        if left:
            source, slots = EachOnce(self, left), of_host(self, self.at_a_time)
            Parallel(self, source, slots[: len(left)]).run()

    def _is_over(self, number: int, point: SweepJob) -> bool:
        """Whether a sweep that goes on finds this job done; then notes its result."""
        folder = self.folder / point.subdir
        if not _is_done(point.ready, folder):
            return False
        self._end(number, point.overrides, replace(read_result(str(folder), "done", ""), run_dir=str(folder)))
        return True

    def _job(self, number: int, point: SweepJob) -> str:
        """Run one job; returns its status. A failure is recorded; an interruption ends the sweep."""
        overrides, where = point.overrides, str(self.folder / point.subdir)
        begun: Ready | None = None
        self._announce(number, overrides)
        try:
            with in_its_folder(point, self._ready(point, where), self.folder) as begun:
                result = execute(begun, start_here, [*self.flags, *overrides], self.tracker, self.folder)
        except (Interrupted, KeyboardInterrupt) as error:
            if begun is not None:
                say_broken(begun)
            cut = _cut(error)
            if begun is not None and (note := how_to_go_on(cut, begun, [*self.flags, *overrides])):
                cut.add_note(note)
            status = PREEMPTED if isinstance(cut, RunPreempted) else "killed"
            self._end(number, overrides, _left(begun, where, status, str(cut)))
            raise cut from None
        except (RunFailed, UserError) as error:
            if begun is not None:
                say_broken(begun)
            print(f"job failed: {error}", flush=True)
            if begun is not None and (resumes := how_to_resume(begun, [*self.flags, *overrides])):
                print(resumes, flush=True)
            result = _left(begun, where, "failed", str(error))
        self._end(number, overrides, result)
        return result.status

    def _announce(self, number: int, overrides: list[str]) -> None:
        """Print the job's number, and the overrides in which it differs from others."""
        Screen().print(f"\n--- job {number} of {len(self.jobs)}: {command(self.shown(overrides))}")

    def _ready(self, point: SweepJob, where: str) -> Ready:
        """Check the next job again: the machine may have changed."""
        compose.place(point.config, Path(where))
        planned = point.ready.plan
        ready = get_ready(plain(point.config), typed_keys(point.overrides), where, whole=planned.paths.whole_path)
        ready = ready.with_plan(remarks={"left_out": planned.remarks.left_out})
        return replace(ready, swept=frozenset(self.swept), later=bool(self.ended))

    def _end(self, number: int, overrides: Sequence[str], result: Result) -> None:
        self.ended[number] = self.row(self.shown(overrides), result)

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

    def _close(self, status: str) -> None:
        """Print the table of all jobs, also of those that did not start, and end the MLflow run."""
        every = [
            self.ended.get(number) or sweep_table.waiting(text(o) for o in left)
            for number, left in enumerate(self.jobs)
        ]
        closing = Closing(say)
        with closing.step("the sweep's table"):
            sweep_table.show_sweep(every, self.folder, self.subdirs)
        with closing.step("the sweep's report"):
            sweep_report.leave(self.folder)
        with closing.step("the end of the sweep's tracking"):
            if self.tracker is not None:
                sweep_tracking.close(self, self.tracker, status, every)
        closing.tell()


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


def _cut(error: Interrupted | KeyboardInterrupt) -> Interrupted:
    """The error that ends the sweep after this error of a job."""
    if isinstance(error, AskedToLeave):  # before the job had begun
        return RunPreempted(NOTHING_NEW.format(error))
    return error if isinstance(error, Interrupted) else Interrupted(str(error) or BY_CTRL_C)


def _left(begun: Ready | None, where: str, status: str, error: str) -> Result:
    """The result of a failed job; if it had not begun, a result.json in its folder is another run's."""
    return read_result(where, status, error) if begun is not None else Result(status, where, error=error)


def _is_done(ready: Ready, folder: Path) -> bool:
    """Whether a sweep that resumes has nothing left to do for this job: it is done, and these settings add nothing."""
    resume = ready.plan.resume
    if resume is None or not resume.here or resume.matters or resume.lost:
        return False
    if resume.harmless and resume.step < ready.plan.length.total_steps:  # more epochs, for example
        return False
    return read_result(str(folder), "failed", "").status == "done"
