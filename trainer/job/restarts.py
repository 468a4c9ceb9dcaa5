"""Restarts a run's processes from the newest checkpoint after one has died or the numbers became NaN or infinite."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from trainer.planning.launcher import Assignment, Deaths
from trainer.run_folder import lives
from trainer.run_folder.reset_files import POINTS, REPORT, reset_to_checkpoint
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.tracking.client import RecorderProcess


def start_and_restart(
    start: Callable[[Assignment], dict[str, Any]],
    ready: Ready,
    result: Result,
    tracker: RecorderProcess | None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the job's processes, with restarts; returns what the first worker returned in the last life.

    Raises:
        RunFailed: a process has died too often, or twice after the same update; numbers were not finite too often; or
            the run failed otherwise.
    """
    deaths = Deaths(ready.plan.topology.restarts, clock)
    try:
        return _to_the_end(start, ready, result, tracker, deaths)
    finally:  # however the run ends
        result.returned = deaths.returned
        result.restarts += len(deaths.returned)


def _to_the_end(
    start: Callable[[Assignment], dict[str, Any]],
    ready: Ready,
    result: Result,
    tracker: RecorderProcess | None,
    deaths: Deaths,
) -> dict[str, Any]:
    assignment = ready.assignment
    while True:
        try:
            outcome = start(replace(assignment, deaths=deaths))
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
    """Which rewind the run has after numbers that are not finite.

    Raises:
        NotFinite, RunFailed: it has none.
    """
    if config.on_nonfinite != "rewind":
        raise bad
    if before >= config.max_rewinds:
        raise RunFailed(
            f"{bad}\nafter {counted(before, 'rewind')} (max_rewinds): the run does not go back again"
        ) from bad
    return f"rewind {before + 1} of {config.max_rewinds}"


def _set_report_aside(run_dir: Path, number: int, bad: NotFinite) -> NotFinite:
    """``nonfinite.json`` becomes ``nonfinite.N.json``, so that each rewind has its own; returns the error that tells
    so."""
    report = run_dir / REPORT
    if not report.is_file():
        return bad
    aside = report.replace(report.with_suffix(f".{number}.json"))
    return NotFinite(str(bad).replace(str(report), str(aside)), bad.step, bad.epoch, bad.update)


def _again(
    ready: Ready, last: Assignment, error: Died | NotFinite, which: str, tracker: RecorderProcess | None, result: Result
) -> Assignment:
    """What the processes of the next life are handed; the run's folder is as it was at the checkpoint.

    Args:
        result: counts the updates that are done again after a death.
        last: what those of the life before were handed.
        error: why these ended; after numbers that were not finite the batches come in another order.
    """
    say = screen()
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


def screen() -> Callable[[str], None]:
    """A function that prints a line about restarts on the screen."""
    from trainer.terminal.screen import Screen

    out = Screen()
    return lambda line: out.print(line, soft_wrap=True)


def whence(resume: str) -> str:
    """Where a run resumes from when it restarts, in words."""
    return f"from {Path(resume).name}" if resume else "from the beginning: there is no checkpoint yet"


def begin_again(
    ready: Ready, tracker: RecorderProcess | None, how: str, update: int, why: str, workers: int
) -> tuple[store.About | None, str]:
    """Restart a run: set its folder back to its newest checkpoint, and begin another life.
    Returns that checkpoint's facts and folder (another run's if this run has none yet).

    Args:
        how, update, why: the end of the life before.

    Raises:
        RunFailed: it has checkpoints, and none is whole.
    """
    run_dir, say = Path(ready.plan.paths.run_dir), screen()
    try:
        folder = store.newest_to_go_on(run_dir / CHECKPOINTS, say)
        if folder is None and ready.plan.resume is not None:
            folder = Path(ready.plan.resume.folder)
        about = store.about(folder) if folder is not None else None
    except UserError as error:
        raise RunFailed(f"{error.what}: {error.why}: the run is not started again") from error
    store.forget_unfinished(run_dir / CHECKPOINTS)
    put_back(run_dir, folder, say)
    _forget_since(run_dir, about.points if about is not None else 0, tracker, say)
    lives.end(run_dir, how, update, text(why, ready.secrets))
    before = lives.read(run_dir)
    command = before[-1].command if before else ""
    lives.begin(run_dir, before, about.done if about is not None else 0, workers, command)
    return about, str(folder or "")


def workers_update(death: Died) -> int:
    """How many updates were done when a death led to a restart: by the worker that was furthest, or the dead server."""
    return max([n for name, n in death.done.items() if name.startswith("worker")] or [death.update])


def updates_since(death: Died, checkpoint: str) -> int:
    """How many updates after a checkpoint are lost with a death.
    Counted at the server that had done most; without servers, at the worker that had.

    Args:
        checkpoint: its folder; empty: the run goes back to its beginning.
    """
    from trainer.weights.server_files import parts_of

    at_servers = {int(name.split()[1]): n for name, n in death.done.items() if name.startswith("server")}
    saved = {part.server: part.version for part in parts_of(Path(checkpoint))} if checkpoint else {}
    if at_servers:
        return max(0, *(done - saved.get(server, 0) for server, done in at_servers.items()))
    return max(0, workers_update(death) - (store.about(Path(checkpoint)).done if checkpoint else 0))


def _forget_since(run_dir: Path, points: int, tracker: RecorderProcess | None, say: Callable[[str], None]) -> None:
    """Cut metrics.jsonl to ``points`` bytes, and let the tracker take back points that it has sent."""
    path = run_dir / POINTS
    cut = path.read_bytes()[points:] if path.is_file() else b""
    reset_to_checkpoint(run_dir, points, say)
    if tracker is not None:
        tracker.go_back(run_dir, points, cut.decode(errors="replace"))
