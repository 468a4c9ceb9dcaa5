"""The run's folder before a run begins there: emptied, or put back to the checkpoint from which the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.redact import command
from trainer.errors import UserError
from trainer.job.ready import Ready
from trainer.planning.plan import Plan
from trainer.planning.resume import CHECKPOINTS, Resume
from trainer.run_folder import lives
from trainer.run_folder.again import bring, go_back
from trainer.run_folder.leftovers import clear
from trainer.run_folder.lives import Life
from trainer.terminal.bar import read_status
from trainer.tracking import tracking_file

PATIENCE_S = 30.0
"""Longest wait for the process that sends the points of the life before: it tries for some seconds to tell its end."""


def own_folder(plan: Plan) -> Path:
    """Where this host's launcher writes: the run's folder, which hosts may share, belongs to host 0."""
    run_dir = Path(plan.run_dir)
    return run_dir / f"host.{plan.node_rank}" if plan.node_rank else run_dir


def check_nobody_follows(run_dir: Path, say: Callable[[str], None]) -> None:
    """Wait until all that is left of the life before has ended.

    Raises:
        UserError: it does not end.
    """
    if not tracking_file.free(run_dir, PATIENCE_S, lambda: say("waits for the end of the run's life before")):
        why = "a process still follows the run in this folder: the run goes on, or its last points are being sent"
        raise UserError(f"hydra.run.dir={run_dir}", why, "the same command when that has ended")


def make_room(mine: Path, ready: Ready, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Make this host's folder, without what a run before left there; a run that goes on finds its own files."""
    plan, resume = ready.plan, ready.resume
    mine.mkdir(parents=True, exist_ok=True)
    if resume is not None and resume.here:
        store.forget_unfinished(Path(plan.run_dir) / CHECKPOINTS)
        store.set_aside_newer(resume.folder)
    elif clear(mine, None if plan.node_rank else plan.nnodes):
        say(f"written over: the run that was in {mine}")
    if plan.mode == "train" and not plan.node_rank:
        before = _taken_up(mine, resume, say) if resume is not None else ()
        lives.begin(mine, before, resume.step if resume is not None else 0, plan.workers, command(overrides))


def _taken_up(run_dir: Path, resume: Resume, say: Callable[[str], None]) -> tuple[Life, ...]:
    """Put the run's files back to the checkpoint, or bring those of the run that it goes on with; returns its lives so far.

    To do it twice changes nothing: who is killed in it does it again.
    """
    source, points = resume.source, resume.about.points
    before = lives.past(source)
    if resume.here:
        tracking_file.cut(run_dir, points)
        go_back(run_dir, points, say)
        return before
    best = read_status(source).get("best") or {}
    bring(source, run_dir, points, best.get("step", resume.step + 1) <= resume.step, say)
    return lives.until(before, resume.step)
