"""Closes a run in named steps; a failing step neither stops the others nor hides how the run ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.redact import hide, scrub, text
from trainer.config.schema.run import MLFLOW
from trainer.errors import PREEMPTED, PRUNED, first_line
from trainer.host.engine_tasks import ENGINE
from trainer.planning.plan import Plan
from trainer.run_folder import lives, repeat
from trainer.tasks.contract import task_of
from trainer.wording import counted, quoted

if TYPE_CHECKING:
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.tracking.client import RecorderProcess

KILLED_FLUSH_S = 4.0
CUT_SHORT = ("killed", PREEMPTED, PRUNED)
"""Statuses of runs that have little time for their end."""


class Closing:
    """Runs the steps that close a run; a failing step is remembered, and the others still run.

    Args:
        say: shows a line to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.failed: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context manager: one named step of closing; an exception in it is remembered and not raised.

        A user's own class may raise anything in it, SystemExit included.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failed.setdefault(f"{type(error).__name__}: {first_line(error)}", []).append(name)

    def tell(self) -> None:
        """Print one line for each reason for which steps failed."""
        for why, names in self.failed.items():
            with contextlib.suppress(Exception):  # whoever read the lines may be gone
                self.say(f"could not be done at the end: {', '.join(names)} ({why})")


def finish(
    result: Result, run_dir: Path, ready: Ready, overrides: Sequence[str], tracker: RecorderProcess | None
) -> None:
    """Close a run: status, result, pictures, the end of tracking; a failing step does not stop the others."""
    from trainer.checkpoint import store
    from trainer.run_folder.json_files import leave
    from trainer.terminal import streams
    from trainer.terminal.screen import say
    from trainer.terminal.status import read_status

    if result.status == PREEMPTED and (run_dir / ENGINE / PRUNED).exists():  # its search has asked it to end
        result.status = result.ended = PRUNED
    closing = Closing(say)
    with closing.step("status.json"):
        _close_status(result, run_dir, ready.plan)
    with closing.step("result.json"):
        leave(run_dir / "result.json", asdict(result))
    if ready.plan.mode == "train" and not ready.plan.topology.node_rank:
        with closing.step("lives.json"):
            lives.end(run_dir, result.status, result.steps, text(result.error.partition("\n")[0], ready.secrets))
    with closing.step("logs without secrets"):
        from trainer.tracking.trackers import LOGS

        scrub(Path(ready.plan.paths.run_dir), LOGS, ready.secrets)
    if result.status == "done" and ready.plan.mode == "train" and not ready.plan.topology.node_rank:
        with closing.step("what lost workers have left of checkpoints"):
            store.forget_unfinished(run_dir / store.CHECKPOINTS)
    with closing.step("result.json with what nobody has taken"):  # which waits for a reader, who may take nothing more
        if not_printed := streams.not_taken():
            result.not_printed = not_printed
            leave(run_dir / "result.json", asdict(result))
    if result.status == "done" and tracker is not None:
        with closing.step("the trained model for the trackers"):
            tracker.trained(run_dir)
    if result.status not in CUT_SHORT:
        _draw(closing, run_dir, ready)
    if tracker is not None:
        with closing.step("the end of tracking"):
            _close_tracking(result, run_dir, ready, overrides, tracker)
        with closing.step("result.json and status.json with the trackers"):
            leave(run_dir / "result.json", asdict(result))
            leave(run_dir / "status.json", {**read_status(run_dir), "tracking": result.tracking})
    closing.tell()
    if result.not_printed:
        with contextlib.suppress(OSError):
            print(
                f"not all of the screen's lines were taken ({result.not_printed}): the run did not need them",
                file=sys.stderr,
            )


def _close_status(result: Result, run_dir: Path, plan: Plan) -> None:
    """Write the last status. A failed run's result gets its last and best metrics from the status before."""
    from trainer.run_folder.json_files import leave
    from trainer.terminal.status import read_status

    status = {"state": "starting", "step": 0, "total": plan.length.total_steps, **read_status(run_dir)}
    status["life"] = lives.number(run_dir)
    status["state"] = result.status
    status |= {name: size for name, size in result.chosen.items() if name == "batch_size"}
    if result.status == "done":
        total = max(status["total"], result.steps)
        status |= {"step": result.steps, "total": total, "percent": 100.0, "eta_s": 0.0, "metrics": result.metrics}
        if plan.objective.best in result.best:  # a suspended worker may have written an older best value
            best = {"metric": plan.objective.best, "value": result.best[plan.objective.best], "step": result.best_step}
            status |= {"bests": result.best, "best": best}
    elif not result.metrics:
        result.metrics, result.steps = status.get("metrics", {}), status["step"]
        result.best, result.best_step = status.get("bests", {}), (status.get("best") or {}).get("step", 0)
    leave(run_dir / "status.json", status)


def _draw(closing: Closing, run_dir: Path, ready: Ready) -> None:
    """Draw the pictures of the run and of its last validation; the user's own data source may fail there."""
    from trainer.job import curves
    from trainer.metrics.validation_file import WHICH, read

    plan, checked, task = ready.plan, ready.checked, task_of(ready.checked.config)
    title = f"{plan.paths.name}: {plan.strategy.name}, {counted(plan.topology.workers, 'worker')}"
    if plan.mode == "train":
        with closing.step("curves.png"):
            curves.draw(run_dir, title, task.curve)
    with closing.step("servers.png"):
        curves.draw_servers(run_dir, f"{title}, {counted(plan.topology.roles.get('server', 0), 'server')}")
    with closing.step("the pictures of the validation"):
        for which in WHICH:
            if (found := read(run_dir, which)) is not None:
                task.pictures(run_dir, which, found, checked.class_names(), f"{title}, {which} validation")


def _close_tracking(
    result: Result, run_dir: Path, ready: Ready, overrides: Sequence[str], tracker: RecorderProcess
) -> None:
    """Send the remaining points, the end of the run and its artifacts to the trackers."""
    from trainer.terminal.screen import Screen
    from trainer.tracking.describe import NOTE, note

    ended = {"done": "FINISHED", "failed": "FAILED"}.get(result.status, "KILLED")
    patience = KILLED_FLUSH_S if result.status in CUT_SHORT else ready.checked.config.tracking.flush_timeout_s
    tags = {"trainer.error": result.error[:4000]} if result.error else {}
    if result.status in (PREEMPTED, PRUNED):
        tags["trainer.state"] = result.status.upper()
    if result.ended.startswith(("early stop", "stopped by a callback")):
        tags["trainer.ended"] = result.ended
    if result.chosen.get("num_workers") not in (None, ready.plan.chosen.num_workers):
        tags["trainer.num_workers"] = f"{result.chosen['num_workers']}: {result.why['num_workers']}"
    if size := result.chosen.get("batch_size"):
        tags |= {"trainer.batch_size": f"{size}: {result.why.get('batch_size', '')}"}
    counts = {
        "restarts": result.restarts,
        "lost_updates": result.lost_updates,
        "skipped": result.skipped,
        "rewinds": result.rewinds,
    }
    lists = {
        "lost_workers": "; ".join(result.lost_workers.values()),
        "not_copied": ", ".join(result.not_copied),
        "not_printed": result.not_printed,
    }
    tags |= {f"trainer.{name}": str(value)[:4000] for name, value in {**counts, **lists}.items() if value}
    past = lives.read(run_dir)
    repeats = repeat.words(ready.checked.config, overrides, past, Path(ready.plan.paths.run_dir))
    tags[NOTE] = note(ready.plan, repeats, asdict(result), past)
    at = tracker.close(run_dir, ended, hide(tags, ready.secrets), patience)
    result.tracking = {name: asdict(one) for name, one in at.items()}
    if MLFLOW in at:
        result.run_id, result.experiment_id = at[MLFLOW].id, at[MLFLOW].group or None
    for name, one in at.items():
        if one.error or one.unsent:
            left = f"{one.error}; {counted(one.unsent, 'line')} of metrics.jsonl left"
            if result.status == PREEMPTED:  # the same run goes on, with all points from here on that a tracker lacks
                Screen().print(f"{name}: the rest is sent when the run resumes ({left})")
                continue
            resend = f"python -m trainer.tracking.recorder resend {quoted(str(run_dir))}"
            Screen().print(f"{name}: not everything is sent ({left}). Later: {resend}")
