"""Runs that another engine has: a submission with ``launch.wait=false`` leaves a row in the queue, and the engine is
asked for its state through the job's handle."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.instantiate import call_target
from trainer.errors import Interrupted, RunPreempted, UserError
from trainer.host import json_text
from trainer.host.code_version import code_version
from trainer.host.engine_tasks import ENGINE
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, Handle, Job, State, Submitter, Unreachable
from trainer.launch.engines.contract import RUNNING as RUNS
from trainer.launch.engines.engine_folder import read_code
from trainer.planning.launcher import Launcher
from trainer.service.queue import (
    CANCEL,
    CANCELLED,
    DONE,
    FAILED,
    PREEMPTED,
    QUEUED,
    RUNNING,
    SUBMITTED,
    Queue,
    Run,
    Submission,
    user,
)

STATES = {PENDING: QUEUED, REQUEUED: PREEMPTED, RUNS: RUNNING}


def note(launcher: Submitter, job: Job, log: str) -> None:
    """Leave a row for a job that an engine has accepted; a folder has one, of its last job.

    Raises:
        UserError: the queue cannot be used.
    """
    the_queue, kind = Queue(), type(launcher)
    before = the_queue.in_folder(str(job.folder))
    if before is not None and before.state == SUBMITTED:
        the_queue.set(before.number, words=list(job.words))
        return
    launch = {**launcher.config, "_target_": f"{kind.__module__}.{kind.__qualname__}"}
    run = Submission(
        name=job.name,
        folder=str(job.folder),
        log=log,
        words=["-m"] * bool(job.points) + list(job.words),
        command=list(job.command),
        started_in=job.started_in,
        config=json.dumps(launch),
        engine=launcher.engine or kind.__name__,
        user=user(),
        code_version=code_version(job.started_in),
        hosts=job.hosts,
        cores=job.needs.cores or 1,
        gpus=job.needs.gpus or 0,
        state=SUBMITTED,
    )
    the_queue.add([run])
    the_queue.close()


def handle_of(the_queue: Queue, run: Run) -> Handle | None:
    """Return the engine's job of a run; None: it has ended, and a command has shown that.

    Raises:
        UserError: the engine does not answer, or its launcher cannot be made any more.
    """
    launcher = call_target(json.loads(the_queue.start_of(run.number)[1]), "launch", kind=Launcher)
    assert isinstance(launcher, Submitter), "a submitter has left the row"
    living = launcher.living([Path(run.folder, ENGINE)])
    return None if living is None else living.handle


def asked(the_queue: Queue, run: Run) -> Run:
    """Return a run with the state that its engine says; an end is kept in the queue."""
    if run.state != SUBMITTED:
        return run
    try:
        handle = handle_of(the_queue, run)
        state = _shown_end(Path(run.folder)) if handle is None else handle.state()
    except (UserError, Unreachable) as error:
        why = error.why if isinstance(error, UserError) else str(error)
        return replace(run, reason=f"{run.engine} does not answer: {why}")
    if state.phase != ENDED:
        return replace(run, state=STATES[state.phase], reason=state.reason)
    # What has saved and is not requeued was asked to end from outside.
    ends = {0: DONE, Interrupted.exit_code: CANCELLED, RunPreempted.exit_code: CANCELLED}
    now = ends.get(state.code, CANCELLED if run.asked == CANCEL else FAILED)
    reason = state.reason or ("" if now != FAILED else f"exit code {state.code}")
    end: dict[str, Any] = {"state": now, "reason": reason, "code": state.code, "ended": time.time()}
    the_queue.move(run.number, (SUBMITTED,), None, **end)
    return replace(run, **end)


def _shown_end(folder: Path) -> State:
    """The end of a job that a command has shown, by the files that it has left."""
    if (code := read_code(folder / ENGINE)) is not None:
        return State(ENDED, "", code)
    try:
        status = json_text.read_object(folder / "result.json").get("status")
    except (OSError, ValueError):
        return State(ENDED, "without a result" if os.path.isdir(folder) else "its folder is gone", 1)
    return State(ENDED, "", {"done": 0, "killed": Interrupted.exit_code}.get(str(status), 1))
