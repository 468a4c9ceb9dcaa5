"""Restarts a run's processes from the newest checkpoint after one has died or the numbers became NaN or infinite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import store
from trainer.checkpoint.best_weights import put_back
from trainer.checkpoint.store import CHECKPOINTS
from trainer.config.redact import text
from trainer.config.run_config import RunConfig
from trainer.data.batch_reordering import Rewind
from trainer.errors import Died, NotFinite, RunFailed, UserError, first_line
from trainer.planning.launcher import Assignment, Deaths, Starter, Supervision
from trainer.run_folder import lives
from trainer.run_folder.reset_files import REPORT, reset_to_checkpoint
from trainer.terminal.screen import say
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.tracking.client import RecorderProcess


def start_and_restart(start: Starter, ready: Ready, result: Result, tracker: RecorderProcess | None) -> dict[str, Any]:
    """Run the job's processes, with restarts; returns what the first worker returned in the last life.

    Raises:
        RunFailed: a process has died too often, or twice after the same update; numbers were not finite too often; or
            the run failed otherwise.
    """
    deaths = Deaths(ready.plan.topology.restarts)
    try:
        return _to_the_end(start, ready, result, tracker, deaths)
    finally:  # however the run ends
        result.returned = deaths.returned
        result.restarts += len(deaths.returned)


def _to_the_end(
    start: Starter, ready: Ready, result: Result, tracker: RecorderProcess | None, deaths: Deaths
) -> dict[str, Any]:
    assignment = ready.assignment
    while True:
        try:
            outcome = start(assignment, Supervision(deaths))
            outcome.pop("asked", None)
            return outcome
        except Died as death:
            which = deaths.restart(death)
            result.restarts += 1
            assignment = _again(ready, assignment, death, which, tracker, result)
        except NotFinite as error:
            which = _rewind(ready.checked.config, error, result.rewinds)
            result.rewinds += 1
            bad = _set_report_aside(Path(ready.plan.paths.run_dir), result.rewinds, error)
            assignment = _again(ready, assignment, bad, which, tracker, result)


def _rewind(config: RunConfig, bad: NotFinite, before: int) -> str:
    """Allow a rewind, and return which of how many it is, in words.

    Raises:
        NotFinite, RunFailed: none is allowed.
    """
    if config.on_nonfinite != "rewind":
        raise bad
    if before >= config.max_rewinds:
        raise RunFailed(
            f"{bad}\nafter {counted(before, 'rewind')} (max_rewinds): the run does not go back again"
        ) from bad
    return f"rewind {before + 1} of {config.max_rewinds}"


def _set_report_aside(run_dir: Path, number: int, bad: NotFinite) -> NotFinite:
    """Rename ``nonfinite.json`` to ``nonfinite.N.json``, one for each rewind; returns the error with the new name."""
    report = run_dir / REPORT
    if not report.is_file():
        return bad
    aside = report.replace(report.with_suffix(f".{number}.json"))
    return NotFinite(str(bad).replace(str(report), str(aside)), bad.step, bad.epoch, bad.update)


def _again(
    ready: Ready, last: Assignment, error: Died | NotFinite, which: str, tracker: RecorderProcess | None, result: Result
) -> Assignment:
    """Set the run's folder back to its checkpoint; returns the assignment of the next life.

    Args:
        last: the assignment of the life that has ended.
        error: why it ended. After :class:`NotFinite` the batches come in another order.
        result: counts the updates that are done again.
    """
    say(f"\nATTENTION: {error}")
    bad = error if isinstance(error, NotFinite) else None
    update = workers_update(error) if isinstance(error, Died) else error.step
    about, resume = begin_again(ready, tracker, "failed", update, first_line(error), ready.plan.topology.workers)
    order = ", with the batches in another order" if bad is not None else ""
    lost = updates_since(error, resume) if isinstance(error, Died) else 0
    result.lost_updates += lost
    again = f"; {counted(lost, 'update')} since then {'is' if lost == 1 else 'are'} lost and done again" if lost else ""
    say(f"{which}: all processes are started again, {whence(resume)}{order}{again}\n")
    rewinds = last.rewinds if resume == last.resume else ()  # a newer checkpoint knows those before it
    if bad is not None:
        begun = (about.epoch, about.update) if about is not None else (0, 0)
        rewinds = (*rewinds, Rewind(*begun, bad.epoch, bad.update))
    return replace(ready.assignment, again=True, resume=resume, rewinds=rewinds)


def whence(resume: str) -> str:
    """Where a run resumes from when it restarts, in words."""
    return f"from {Path(resume).name}" if resume else "from the beginning: there is no checkpoint yet"


def begin_again(
    ready: Ready, tracker: RecorderProcess | None, how: str, update: int, why: str, workers: int
) -> tuple[store.About | None, str]:
    """Set a run's folder back to its newest checkpoint, and begin another life.

    Returns that checkpoint's facts and folder; those of another run if this run has no checkpoint yet.

    Args:
        how, update, why: the end of the last life.

    Raises:
        RunFailed: it has checkpoints, and none is whole.
    """
    run_dir = Path(ready.plan.paths.run_dir)
    try:
        folder = store.newest_to_go_on(run_dir / CHECKPOINTS, say)
        if folder is None and ready.plan.resume is not None:
            folder = Path(ready.plan.resume.folder)
        about = store.about(folder) if folder is not None else None
    except UserError as error:
        raise RunFailed(f"{error.what}: {error.why}: the run is not started again") from error
    store.forget_unfinished(run_dir / CHECKPOINTS)
    put_back(run_dir, folder, say)
    points = about.points if about is not None else 0
    reset_to_checkpoint(run_dir, points, say)
    if tracker is not None:
        tracker.go_back(run_dir, points)
    lives.end(run_dir, how, update, text(why, ready.secrets))
    before = lives.read(run_dir)
    command = before[-1].command if before else ""
    lives.begin(run_dir, before, about.done if about is not None else 0, workers, command)
    return about, str(folder or "")


def workers_update(death: Died) -> int:
    """Updates at a death that led to a restart: of the worker with most updates, or of the dead server."""
    return max([n for name, n in death.done.items() if name.startswith("worker")] or [death.update])


def updates_since(death: Died, checkpoint: str) -> int:
    """Updates after a checkpoint that a death loses: of the server with most; without servers, of the worker with most.

    Args:
        checkpoint: its folder; empty: the run goes back to its beginning.
    """
    from trainer.weights.server_files import parts_of

    at_servers = {int(name.split()[1]): n for name, n in death.done.items() if name.startswith("server")}
    saved = {part.server: part.version for part in parts_of(Path(checkpoint))} if checkpoint else {}
    if at_servers:
        return max(0, *(done - saved.get(server, 0) for server, done in at_servers.items()))
    return max(0, workers_update(death) - (store.about(Path(checkpoint)).done if checkpoint else 0))
