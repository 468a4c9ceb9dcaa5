"""A slot process of a sweep: runs one job after another, each in its own folder, as ``python -m trainer`` would.

It reads lines of JSON from its input: the sweep first, then each job. For each end it writes a line to a descriptor.
A job's lines go to ``engine/log`` in its folder. Its arguments are the process of the sweep, with which it ends, the
number of the descriptor, and its cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.host import interpreter
from trainer.service.pool import End, Setup, SlotJob

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.job.ready import Ready
    from trainer.tracking.client import RecorderProcess

IDLE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are for a job, and are ignored without one. They are not set to be ignored: a job would keep that."""


def main() -> None:
    """Read the sweep and its jobs from the standard input, and run them."""
    for number in IDLE:
        signal.signal(number, _ignore)
    sweep, answers, cores = int(sys.argv[1]), int(sys.argv[2]), [int(core) for core in sys.argv[3].split(",") if core]
    if cores:  # before torch counts them
        os.sched_setaffinity(0, cores)
    from trainer.host.parent_death import end_with

    end_with(sweep)
    with os.fdopen(os.dup(0)) as jobs:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        setup = Setup(**json.loads(jobs.readline()))
        with _slot(setup) as slot:
            for line in jobs:
                end = slot.run(SlotJob(**json.loads(line)))
                os.write(answers, json.dumps(asdict(end)).encode() + b"\n")


def _ignore(number: int, frame: object) -> None:
    pass


@contextlib.contextmanager
def _slot(setup: Setup) -> Iterator[_Slot]:
    from trainer.cli import compose
    from trainer.cli.sweep_composing import compose_sweep
    from trainer.config.redact import HERE, of_command_line, of_environment
    from trainer.terminal import streams
    from trainer.tracking.client import tracking

    with streams.guarded(), compose.hydra_app(setup.config_dir) as app:
        HERE.learn(of_environment(os.environ), of_command_line(setup.overrides))
        with tracking(setup.trackers) as tracker:
            master = compose_sweep(app, setup.overrides, setup.config_name)
            _import_early()
            yield _Slot(app, master, setup.flags, frozenset(setup.swept), tracker)


def _import_early() -> None:
    """Import what the first job needs, while the recorder imports what it needs."""
    from trainer.cli import sweep_state  # noqa: F401
    from trainer.worker import train  # noqa: F401


class _Slot:
    """What all jobs of the process share.

    Args:
        master: the config that Hydra has composed for all jobs. flags: before the overrides in the command that
        repeats a job. swept: keys in which jobs differ. tracker: of all jobs of this process.
    """

    def __init__(
        self, app: Hydra, master: DictConfig, flags: list[str], swept: frozenset[str], tracker: RecorderProcess | None
    ) -> None:
        self.app, self.master, self.flags = app, master, flags
        self.swept, self.tracker = swept, tracker

    def run(self, job: SlotJob) -> End:
        """Run a job, and return how it has ended."""
        from trainer.cli.last_lines import say_broken, say_result
        from trainer.cli.sweep_points import check_point
        from trainer.cli.sweep_state import in_its_folder
        from trainer.errors import PREEMPTED, AskedToLeave, Interrupted, RunFailed, RunPreempted, UserError
        from trainer.host.signals import termination_raises
        from trainer.job.job import execute
        from trainer.planning.launcher import start_here

        begun: Ready | None = None
        words, folder = [*self.flags, *job.words], Path(job.folder)
        with _lines_to(Path(job.log)), _signals_of_a_job():
            try:
                with termination_raises(lambda: True):
                    point, _ = check_point(self.app, self.master, job.words, job.number, place=(folder, job.subdir))
                    ready = replace(point.ready, swept=self.swept)
                    with in_its_folder(point, ready, folder) as begun:
                        result = execute(begun, start_here, words, self.tracker, folder)
                say_result(result, begun, words)
                return End(result.status)
            except (Interrupted, KeyboardInterrupt) as error:
                status, said = PREEMPTED if isinstance(error, (RunPreempted, AskedToLeave)) else "killed", str(error)
            except (RunFailed, UserError) as error:
                status, said = "failed", str(error)
            except Exception as error:  # a mistake of ours, or of a class of the user's own
                status, said = "failed", f"{type(error).__name__}: {error}"
                traceback.print_exc()
            print(f"{status}: {said}")
            if begun is not None:
                say_broken(begun)
        return End(status, said, begun is not None)


@contextlib.contextmanager
def _lines_to(log: Path) -> Iterator[None]:
    """Context manager: what this process and its children print goes to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = [os.dup(1), os.dup(2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        _point_to([file, file])
        yield
    finally:
        _point_to(before)
        for descriptor in (*before, file):
            os.close(descriptor)


def _point_to(descriptors: list[int]) -> None:
    for stream, number, descriptor in zip((sys.stdout, sys.stderr), (1, 2), descriptors, strict=True):
        stream.flush()
        os.dup2(descriptor, number)


@contextlib.contextmanager
def _signals_of_a_job() -> Iterator[None]:
    """Context manager: Ctrl-C is for the job. Signals that ask it to leave have its own handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _ignore)


if __name__ == "__main__":
    with interpreter.command():
        main()
