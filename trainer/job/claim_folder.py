"""Claims a run's folder before the run begins: made, held, and emptied or set back to the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint import store
from trainer.checkpoint.best_weights import put_back
from trainer.checkpoint.store import CHECKPOINTS
from trainer.config.redact import command
from trainer.errors import UserError
from trainer.host.engine_tasks import ENGINE, SUBMITTED
from trainer.job.ready import Ready
from trainer.planning.find_checkpoint import check_nothing_lost, check_still_newest
from trainer.planning.plan import Resume
from trainer.run_folder import lives
from trainer.run_folder.folder_lock import FolderLock, refusal
from trainer.run_folder.leftovers import clear
from trainer.run_folder.lives import LifeRecord
from trainer.run_folder.reset_files import copy_points, reset_to_checkpoint

PATIENCE_S = 30.0
"""Longest wait for the processes of an earlier life: its recorder tries for some seconds to send its end."""


@contextmanager
def alone(run_dir: Path, say: Callable[[str], None], make: bool = True) -> Iterator[None]:
    """Context manager: no other process works in the run's folder, and its earlier life has ended.

    Args:
        make: make the folder if there is none.

    Raises:
        UserError: the processes of the earlier life do not end.
    """
    hold = FolderLock(run_dir, make)
    try:
        _take(hold, run_dir, PATIENCE_S, say)
        yield
    finally:
        hold.leave()


def wait_for_the_life_before(run_dir: Path, say: Callable[[str], None]) -> None:
    """Wait until the run's folder can be claimed.

    Raises:
        UserError: as of :func:`alone`.
    """
    with alone(run_dir, say, make=False):  # a check writes nothing
        pass


@contextmanager
def held(ready: Ready) -> Iterator[None]:
    """Context manager: claims the run's folder, so that no other run begins or works there.

    A resumed run does not wait: it has waited before it searched for the newest checkpoint. Of several hosts only host
    0 claims the folder; the others work there after all have met.

    Raises:
        UserError: another run works there, or has meanwhile left a checkpoint there.
    """
    if ready.plan.topology.node_rank:
        yield
        return
    run_dir, hold = Path(ready.plan.paths.run_dir), FolderLock(Path(ready.plan.paths.run_dir))
    try:
        patience_s = 0.0 if ready.plan.resume is not None else PATIENCE_S
        _take(hold, run_dir, patience_s, lambda line: print(line, flush=True))
        _check_still_free(ready, run_dir)
        hold.sign()
        if not hold.share():
            raise _busy(hold, run_dir)
        yield
    finally:
        hold.leave()


def _check_still_free(ready: Ready, run_dir: Path) -> None:
    """Check the folder again under the lock, because :func:`make_room` may clear it.

    Raises:
        UserError: a run that can be resumed would be lost.
    """
    config, resume = ready.checked.config, ready.plan.resume
    try:
        if resume is not None and resume.here:
            check_still_newest(config, run_dir, Path(resume.folder))
        else:
            check_nothing_lost(config, run_dir, None if resume is None else Path(resume.folder))
    except OSError as error:
        raise UserError(str(error.filename or run_dir), f"cannot be read: {error.strerror or error}") from error


def _take(hold: FolderLock, run_dir: Path, patience_s: float, say: Callable[[str], None]) -> None:
    def waiting() -> None:
        who = hold.holder()
        say(f"waits for the end of the run that is in {run_dir}{f': {who}' if who else ''}")

    if not hold.take_within(patience_s, waiting):
        raise _busy(hold, run_dir)


def _busy(hold: FolderLock, run_dir: Path) -> UserError:
    instead = (
        "another folder" if hold.shut is not None else "another folder, or the same command when that run has ended"
    )
    return refusal(hold, f"hydra.run.dir={run_dir}", instead)


def make_room(folder: Path, ready: Ready, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Create this host's run folder or clear what an earlier run left there; a resumed run keeps its own files."""
    plan, resume = ready.plan, ready.plan.resume
    folder.mkdir(parents=True, exist_ok=True)
    if SUBMITTED not in os.environ and (folder / ENGINE).is_dir():
        from trainer.launch.engines.engine_folder import forget_ended

        forget_ended(folder)  # a job's end is not this run's
    if resume is not None and resume.here:
        store.forget_unfinished(Path(plan.paths.run_dir) / CHECKPOINTS)
        store.set_aside_newer(Path(resume.folder))
    elif clear(folder, None if plan.topology.node_rank else plan.topology.nnodes):
        say(f"written over: the run that was in {folder}")
    if plan.mode == "train" and not plan.topology.node_rank:
        before = _taken_up(folder, resume, say) if resume is not None else ()
        lives.begin(folder, before, resume.step if resume is not None else 0, plan.topology.workers, command(overrides))


def _taken_up(run_dir: Path, resume: Resume, say: Callable[[str], None]) -> tuple[LifeRecord, ...]:
    """Reset the run's files to its checkpoint, or copy those of the run that it continues; returns its lives so far.

    A second call changes nothing, so a run that is killed here can be started again.
    """
    source, checkpoint = resume.source, Path(resume.folder)
    before, points = lives.past(source), store.about(checkpoint).points
    if resume.here:
        put_back(run_dir, checkpoint, say)
        reset_to_checkpoint(run_dir, points, say)
        return before
    if checkpoint.name.startswith(store.GIVEN_UP):
        say(
            f"ATTENTION: the training of {checkpoint.name} was given up: the points before it in {source} "
            f"are those of the training in its place"
        )
    copy_points(source, run_dir, points, say)
    put_back(run_dir, checkpoint, say)
    return lives.until(before, resume.step)


def claim(folder: Path, chosen: bool, key: str = "hydra.run.dir") -> Path:
    """Create the folder of a run or a sweep: the one that the user chose, else a new one (``NAME-1`` if another run has
    ``NAME``).

    Raises:
        UserError: it cannot be made.
    """
    try:
        if chosen:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for number in itertools.count():
            free = folder.with_name(f"{folder.name}-{number}") if number else folder
            with contextlib.suppress(FileExistsError):
                free.mkdir(parents=True)
                return free
    except OSError as error:
        raise UserError(f"{key}={folder}", f"cannot be made: {error.strerror}", f"{key}=ANOTHER_FOLDER") from error
    raise AssertionError("unreachable")
