"""launch=slurm: the command as a batch job of Slurm, which is requeued until it has ended.

The batch script runs one task on each host, the launcher of that host, and decides what the end of the tasks means:

- Host 0's task has ended, and another host is silent for ``checkpoint.grace_s`` more: that host is lost. The job is
  requeued without it, at most ``launch.max_restarts`` times.
- Exit code 75 of host 0: pre-empted, or out of time (SIGUSR1 comes before). The job is requeued, at most
  ``launch.max_preemptions`` times, and ``resume=auto`` continues the run.
- Exit code 75 after this command was asked to leave (``engine/leave``): the job ends with 75.
- Exit code 75 after somebody has cancelled the job (scancel in another shell): the job ends with 130.
- Another exit code: the job ends with it.

The number of one element of an array is that of the whole array as well. So an element calls itself ARRAY_ELEMENT.

Without a disk that the hosts share, the script and its tasks keep their files in folders of their hosts, and copy them
to the address ``checkpoint.to`` (:mod:`trainer.launch.engines.copies`), from where lives and exit codes come back.

Slurm takes a job that ends inside of its grace period for failed. So the script asks for the requeue itself, and then
waits until Slurm ends it. Files of a job in ``RUN/engine``: ``job.sh``, ``secret`` (0600), ``log``, ``host.N.log``,
``ended.LIFE.HOST`` (exit code of a task), ``lives`` (a line per life: number, exit code, lost hosts) and ``code`` (exit
code of the job). After some minutes Slurm forgets a job; then ``code`` says how it ended.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.errors import UserError
from trainer.host.engine_tasks import ENGINE, SLURM
from trainer.launch.engines.contract import Handle, Job, Living, Submitter, Unreachable
from trainer.launch.engines.engine_folder import (
    LEAVE,
    SHOWN,
    SubmittedJob,
    ask,
    begin,
    left_if_submitted,
    query,
    read_code,
)
from trainer.launch.engines.slurm_concerns import concerns, field, gpus_in_options, what_to_change
from trainer.launch.engines.slurm_job import FORGOTTEN, OVER, SlurmArray, SlurmJob
from trainer.launch.engines.slurm_script import DRAWN, KEYS, rendered
from trainer.launch.engines.submission import outside_of_tasks
from trainer.planning.run_secret import LEAST


class Slurm(Submitter):
    """launch=slurm: sbatch's own options are ``launch.options``."""

    engine = SLURM
    runs_apart = True

    def render(self, job: Job) -> str:
        return rendered(job)

    def concerns(self, job: Job) -> list[str]:
        return concerns(job)

    def gpus_in_options(self, hosts: int) -> tuple[str, int] | None:
        return gpus_in_options(self.options.options, hosts)

    def submit(self, job: Job) -> Handle:
        text = self.render(job).replace(shlex.quote(DRAWN), secrets.token_hex(LEAST))
        of_points = [point.folder / ENGINE for point in job.points]
        with left_if_submitted([job.engine_folder, *of_points]):
            script = begin(job, text)
            for folder in of_points:
                folder.mkdir(parents=True, exist_ok=True)
            hold = ["--hold"] if job.held else []
            command = ["sbatch", "--parsable", *hold, str(script)]
            instead = partial(what_to_change, options=job.options, keys=KEYS)
            answer = ask(command, "launch=slurm", instead=instead, environment=outside_of_tasks())
            number = answer.strip().partition(";")[0]
        submitted = SubmittedJob(self.engine, number, job.words, job.numbered)
        submitted.write(job.engine_folder)
        for element, point in job.numbered.items():
            SubmittedJob(self.engine, f"{number}_{element}", point.words).write(point.folder / ENGINE)
        handle = _handle(submitted, job.engine_folder)
        handle.held = job.held and not {"hold", "H"} & job.options.keys()  # what the user holds stays held
        return handle

    def living(self, folders: Sequence[Path]) -> Living | None:
        ended = None
        for folder in folders:
            before = SubmittedJob.of(folder)
            if before is None or before.engine != self.engine:
                continue
            found = Living(_handle(before, folder), before.words, folder.parent, before.points)
            try:
                said = query(["scontrol", "show", "job", before.number, "-o"]).splitlines()
            except Unreachable as error:
                if FORGOTTEN not in str(error):
                    why = f"{found.handle.name} may still run in this folder, and Slurm does not answer: {error}"
                    raise UserError("launch=slurm", why, "the same command again") from error
                said = []
            if states := {field(line, "JobState") for line in said} - {*OVER}:
                asked = [point.folder / ENGINE for point in before.points.values()] or [folder]
                leaves = states == {"COMPLETING"} or all((one / LEAVE).exists() for one in asked)
                return replace(found, leaves=leaves)
            is_done = _is_done(before, folder)
            if folder == folders[0] and (is_done or not (folder / SHOWN).exists()):
                ended = replace(found, is_over=True, is_done=is_done)
        return ended


def _is_done(submitted: SubmittedJob, folder: Path) -> bool:
    """Whether an ended job, or each job of a sweep, left exit code 0, and no other job was submitted there since."""
    if not submitted.points:
        return read_code(folder) == 0
    for element, point in submitted.points.items():
        last = SubmittedJob.of(point.folder / ENGINE)
        if last is None or last.number != f"{submitted.number}_{element}" or read_code(point.folder / ENGINE) != 0:
            return False
    return True


def _handle(submitted: SubmittedJob, folder: Path) -> SlurmJob | SlurmArray:
    if submitted.points:
        return SlurmArray(submitted.number, folder, submitted.points)
    return SlurmJob(submitted.number, folder)
