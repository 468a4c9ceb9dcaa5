"""Runs one checked job in the parent process: prepare data, track, start the processes, report the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.redact import hide, text, values
from trainer.config.run_config import RunConfig
from trainer.errors import (
    BY_CTRL_C,
    NOTHING_NEW,
    PREEMPTED,
    AskedToLeave,
    Interrupted,
    RunFailed,
    RunPreempted,
    UserError,
)
from trainer.host import early_signals, versions
from trainer.host.code_version import own_sources
from trainer.host.in_use import left_at_the_end
from trainer.host.signals import termination_raises, undisturbed
from trainer.job.checkpoint_rows import kept_rows
from trainer.job.claim_folder import make_room
from trainer.job.closing import finish
from trainer.job.prepared_data import fingerprinted, prepared
from trainer.job.ready import Ready
from trainer.job.restarts import start_and_restart
from trainer.job.result import Result
from trainer.planning.class_names import CLASSES
from trainer.planning.find_checkpoint import can_go_on
from trainer.planning.launcher import Starter
from trainer.planning.plan import Plan
from trainer.run_folder import lives
from trainer.run_folder.repeat import repeatable
from trainer.terminal.screen import say

if TYPE_CHECKING:
    from trainer.tracking.client import RecorderProcess
    from trainer.tracking.contract import TrackedRun


def execute(
    ready: Ready, start: Starter, overrides: Sequence[str], tracker: RecorderProcess | None, parent: Path | None = None
) -> Result:
    """Run a checked job to its end, in a folder that exists; returns its result.

    Raises:
        RunFailed, Interrupted: after everything has been recorded.
    """
    with left_at_the_end():
        return _execute(ready, start, overrides, tracker, parent)


def _execute(
    ready: Ready, start: Starter, overrides: Sequence[str], tracker: RecorderProcess | None, parent: Path | None
) -> Result:
    from trainer.run_folder.json_files import leave
    from trainer.terminal.bar import bar

    began = time.monotonic()
    run_dir, config = Path(ready.plan.paths.run_dir), ready.checked.config
    own_folder = ready.plan.own_folder
    result = Result("failed", str(run_dir), mode=ready.plan.mode, validation=config.validation)
    tracked = False
    try:
        with termination_raises(partial(can_go_on, config, ready.plan)):
            _begin_folder(own_folder, ready, overrides)
            ready = fingerprinted(_with_batch(ready, _measured(prepared(ready))), tracker is not None)
            overrides = repeatable(overrides, _chosen(ready.plan).get("batch_size"))
            plan = ready.plan
            result.chosen, result.why, result.class_weights = (
                _chosen(plan),
                plan.remarks.why,
                plan.objective.class_weights,
            )
            result.made_with = {"code": own_sources(), "data": ready.digest, "versions": versions.installed()}
            result.data_source, result.stand_in = plan.data.facts.source, plan.data.facts.stand_in
            leave(own_folder / "plan.json", plan.as_dict(), private=True)
            _show(ready)
            if config.mode != "predict":
                _leave_names(own_folder, ready)
            if tracker is not None:
                from trainer.tracking.describe import secrets_of

                tracker.open(run_dir, _tracked_run(ready, overrides, parent), secrets_of(config))
                tracked = True
            with _uploading(ready, result), bar(run_dir, plan.length.total_steps, config.verbosity):
                outcome = _starter(ready)(start, ready, result, tracker)
        result = _with(outcome, result, plan)
        if result.status == PREEMPTED:
            raise RunPreempted(f"a checkpoint was saved after update {result.steps}{plan.updates_of}")
        return result
    except RunPreempted:
        raise
    except AskedToLeave as error:
        result.status, result.ended = PREEMPTED, PREEMPTED
        raise RunPreempted(NOTHING_NEW.format(error)) from None
    except (Interrupted, KeyboardInterrupt) as error:
        result.status, result.error = "killed", str(error) or BY_CTRL_C
        raise Interrupted(result.error) from None
    except UserError as error:
        result.error = str(error)
        raise
    except (RunFailed, OSError) as error:
        said = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        result.error = text(said, ready.secrets)
        raise RunFailed(result.error) from error
    except Exception as error:  # a mistake of ours, or of a source of the user's own
        result.error = text(f"{type(error).__name__}: {error}", ready.secrets)
        raise
    finally:
        with undisturbed():
            result.seconds = round(time.monotonic() - began, 3)
            finish(result, own_folder, ready, overrides, tracker if tracked else None)


def _starter(ready: Ready) -> Callable[[Starter, Ready, Result, RecorderProcess | None], dict[str, Any]]:
    """The function that runs the lives: on a fixed number of hosts, or on hosts that come and go."""
    if not ready.plan.topology.least_nnodes:
        return start_and_restart
    from trainer.job.elastic import start_on_hosts

    return start_on_hosts


def _uploading(ready: Ready, result: Result) -> AbstractContextManager[None]:
    """Context manager: copies checkpoints to ``checkpoint.to``, if it is set and this is host 0."""
    config = ready.checked.config
    if config.checkpoint.to is None or ready.plan.topology.node_rank or not config.saves_checkpoints:
        return nullcontext()
    from trainer.job.uploads import uploading

    return uploading(ready, result, say)


def _begin_folder(own_folder: Path, ready: Ready, overrides: Sequence[str]) -> None:
    """Make or clear the run's folder, and write its config. From now on the job has to be closed."""
    early_signals.job_begins()
    make_room(own_folder, ready, overrides, say)
    _leave_config(own_folder, ready.checked.config)
    if ready.checked.config.mode == "train":
        (Path(ready.plan.paths.run_dir) / "checkpoints").mkdir(exist_ok=True)


def _with(outcome: dict[str, Any], result: Result, plan: Plan) -> Result:
    """The result after all workers have ended well."""
    chosen = {**_chosen(plan), **outcome.pop("chosen", {})}
    why = {**plan.remarks.why, **outcome.pop("why", {})}
    ended = replace(result, chosen=chosen, why=why, **outcome)
    return replace(ended, status=PREEMPTED if ended.ended == PREEMPTED else "done")


def _measured(ready: Ready) -> Ready:
    """The job with the precision that is the fastest on this machine's GPU, for ``precision=auto``."""
    if ready.checked.device != "cuda":
        return ready
    from trainer.job.measured_precision import measured

    return measured(ready, say)


def _with_batch(asked: Ready, ready: Ready) -> Ready:
    """The job with the largest batch that fits, for ``data.batch_size=auto``; ``asked``: before data were prepared."""
    if not ready.checked.searches:
        return ready
    from trainer.job.balanced_weights import weighed
    from trainer.job.batch_size_search import found

    ready = weighed(found(asked, ready, prepared, say))
    _leave_config(ready.plan.own_folder, ready.checked.config)
    return ready


def _chosen(plan: Plan) -> dict[str, Any]:
    """The choices of ``auto``, with the batch size if it was searched for."""
    size = {"batch_size": plan.batches.size} if "batch_size" in plan.remarks.why else {}
    return {**size, **plan.chosen.flat()}


def _show(ready: Ready) -> None:
    """The plan on the screen."""
    from trainer.job import plan_table

    if ready.later:
        plan_table.show_briefly(ready.plan, ready.checked.config.verbosity)
    else:
        plan_table.show_plan(ready.plan, ready.checked.config.verbosity, [*_tracking_rows(ready), *kept_rows(ready)])


def _tracking_rows(ready: Ready) -> Iterator[tuple[str, str]]:
    """Rows of the plan table about trackers."""
    if not ready.checked.config.tracking.trackers:
        yield "tracking", "none (the run folder only)"
        return
    from trainer.tracking import trackers

    yield from trackers.rows(ready.checked.config.tracking, Path(ready.plan.paths.run_dir))


def _tracked_run(ready: Ready, overrides: Sequence[str], parent: Path | None) -> TrackedRun:
    """The description of the run for its trackers."""
    from trainer.tracking.describe import describe

    config, plan = ready.checked.config, ready.plan
    past = lives.read(Path(plan.paths.run_dir)) if plan.mode == "train" else ()
    return describe(config, plan, overrides, parent, ready.digest, ready.swept, past)


def _leave_config(run_dir: Path, config: RunConfig) -> None:
    from trainer.config.run_config import yaml_text
    from trainer.host.files import replace_file

    plain = config.plain()
    replace_file(run_dir / "config.yaml", yaml_text(hide(plain, values(plain))), private=True)


def _leave_names(run_dir: Path, ready: Ready) -> None:
    """Write the names of the classes, for mode=predict on a machine without the data."""
    from trainer.host.files import replace_file

    checked = ready.checked
    try:
        names = list(checked.class_names())
    except Exception as error:  # a source of the user's own may break where it is asked for names
        say(f"the classes have no names: {type(error).__name__}: {error}")
        return
    if names:
        replace_file(run_dir / CLASSES, json.dumps(names, indent=1))
