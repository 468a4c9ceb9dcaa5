"""Runs the jobs of a sweep, here one by one or by an engine, and closes it: table, report, tracking."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import compose, sweep_pictures, sweep_report, sweep_table, sweep_tracking
from trainer.cli.arguments import typed_keys
from trainer.cli.commands import recorded_by
from trainer.cli.compose import plain
from trainer.cli.last_lines import how_to_go_on, how_to_resume, say_broken
from trainer.cli.submit import SWEEP_DIR
from trainer.cli.sweep_engine import SUBMITTED, cancelled_while_held, living_of, of_engine
from trainer.cli.sweep_points import SweepJob
from trainer.cli.sweep_state import SweepState, in_its_folder
from trainer.config.redact import command
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
from trainer.host.engine_tasks import ENGINE
from trainer.host.files import start_empty
from trainer.host.signals import termination_raises, undisturbed
from trainer.job.check import get_ready
from trainer.job.claim_folder import claim
from trainer.job.closing import Closing
from trainer.job.job import execute
from trainer.job.ready import Ready
from trainer.job.result import Result, read_result
from trainer.launch.engines.engine_folder import unmade_if_refused
from trainer.planning.launcher import start_here
from trainer.planning.tracking_store import try_tracking
from trainer.run_folder.reset_files import POINTS
from trainer.terminal.screen import Screen, say
from trainer.tracking.client import tracking
from trainer.tracking.contract import STILL_RUNNING

if TYPE_CHECKING:
    from trainer.cli.sweep_engine import Submitted
    from trainer.launch.engines.contract import Job as EngineJob
    from trainer.launch.engines.contract import Submitter


@dataclass
class Sweep(SweepState):
    """A sweep that runs its jobs."""

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
            sweep_report.write_axes(self.folder, self.swept, self.space)
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
            self.living = self.living or living_of(self.master, self.folder, [*self.flags, *self.overrides])
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
            slots = of_host(self, self.at_a_time)[: len(left)] if self.pool is None else self.pool.slots
            Parallel(self, EachOnce(self, left), slots).run()

    def warm(self, first: SweepJob, processes: contextlib.ExitStack) -> None:
        """Start the processes for jobs side by side: their imports run beside the checks of the other points."""
        self.points = [first]
        if not self.runs_beside or self.goes_on:
            return
        from trainer.cli.sweep_parallel import of_host, setup_of
        from trainer.service.pool import Pool

        slots = of_host(self, self.at_a_time)[: len(self.jobs)]
        self.pool = processes.enter_context(Pool(slots, setup_of(self)))
        self.pool.warm(len(slots))

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

    def _close(self, status: str) -> None:
        """Print the table of all jobs, also of those that did not start, and end the MLflow run."""
        every = [
            self.ended.get(number) or sweep_table.waiting(self.shown(left)) for number, left in enumerate(self.jobs)
        ]
        closing = Closing(say)
        with closing.step("the sweep's table"):
            sweep_table.show_sweep(every, self.folder, self.subdirs)
        with closing.step("the sweep's report"):
            sweep_report.leave(self.folder)
        if self.tracker is not None:
            with closing.step("the sweep's pictures"):
                sweep_pictures.draw(self.folder)
        with closing.step("the end of the sweep's tracking"):
            if self.tracker is not None:
                sweep_tracking.close(self, self.tracker, status, every)
        closing.tell()


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
