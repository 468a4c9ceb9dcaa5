"""Checks a command wholly: its config, its data and its model, and the checkpoint from which it resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import store
from trainer.config import redact
from trainer.config.redact import values
from trainer.config.run_config import RunConfig
from trainer.errors import RunFailed, UserError
from trainer.host import machine_limits
from trainer.job.balanced_weights import weighed
from trainer.job.claim_folder import wait_for_the_life_before
from trainer.job.ready import Command, NamedFolder, Ready, plan_job
from trainer.job.result import tested_before
from trainer.planning.batches import FIRST_TRY
from trainer.planning.checked_config import Checked
from trainer.planning.class_names import of_checkpoint
from trainer.planning.find_checkpoint import FRESH, find_checkpoint
from trainer.planning.plan import Paths, Plan
from trainer.terminal.screen import say


def get_ready(
    config: Mapping[str, Any],
    typed: Sequence[str],
    run_dir: str,
    place: str = "hydra.run.dir",
    on_checked: Callable[[Checked], None] = lambda checked: None,
    above: Path | None = None,
    whole: bool = False,
    away: bool = False,
    checked: Checked | None = None,
) -> Ready:
    """Check a config wholly and plan the job; writes nothing, except that it may fetch a checkpoint.

    Args:
        place: the key that names ``run_dir``, or the folder ``above`` of the job's sweep.
        whole: the user named the folder by its whole path.
        away: the job is for other machines than this one.
        checked: what the light checks of this config have found out, if they were made already.
        on_checked: called when the light checks are passed, before torch is imported.

    Raises:
        UserError: the job cannot run.
    """
    redact.HERE.learn(values(config))
    try:
        paths = Paths(run_dir, whole_path=whole, started_in=os.getcwd())
        return _get_ready(
            Command(config, tuple(typed), paths, NamedFolder(place, above or Path(run_dir)), away, checked), on_checked
        )
    except OSError as error:  # whatever is read here, the config names
        if limit := machine_limits.reached(error):
            raise RunFailed(limit) from error
        raise UserError(str(error.filename or "the config"), f"cannot be read: {error.strerror or error}") from error


def _get_ready(command: Command, on_checked: Callable[[Checked], None]) -> Ready:
    before = frozenset(sys.modules)
    ready = plan_job(command, on_checked)
    topology = ready.plan.topology
    if len(topology.processes) > 1 or topology.least_nnodes or topology.launcher or ready.checked.searches:
        from trainer.launch.preload import imported_since

        ready = replace(ready, imported=tuple(imported_since(before)))
    checked = ready.checked
    with checked.lacks:
        apart = command.away and not checked.config.node("launch").get("shared_storage", True)
        folder = None if apart else _checkpoint(checked.config, ready.plan)  # the hosts fetch it
        if folder is not None and checked.searches:
            ready = _as_in_checkpoint(ready, folder)
        if folder is not None:
            ready = _resumed(_in_its_precision(ready, folder), folder)
    if checked.device == "cuda":
        from trainer.job.measured_precision import remembered

        ready = remembered(ready)
    ready = weighed(ready, early=True)
    return ready.with_plan(remarks={"lacks": list(dict.fromkeys([*ready.checked.lacks, *checked.lacks]))})


def _resumed(ready: Ready, folder: Path) -> Ready:
    """The job that resumes from a checkpoint; leased blocks keep their size of the run's beginning.

    Raises:
        UserError: the checkpoint does not fit, or is of other classes.
    """
    from trainer.planning.resume import fit, other_classes, with_classes
    from trainer.worker.carried_over import begins_anew

    checked = ready.checked
    other = of_checkpoint(folder.parent.parent, checked.config, checked.source, checked.facts)
    try:
        anew = partial(begins_anew, ready.plan, ready.model, folder)
        resume = fit(checked.config, ready.plan, folder, anew)
    except UserError:  # if the classes differ, so do many other facts: report the classes
        if other and not checked.config.resume.allow_changes:
            raise other_classes(other, str(folder)) from None
        raise
    resume = with_classes(resume, other, checked.config.resume.allow_changes)
    blocks = store.about(folder).lease_batches or ready.plan.batches.lease_batches
    ready = ready.with_plan(resume=resume, batches={"lease_batches": blocks})
    return replace(ready, tested=tested_before(resume))


def _as_in_checkpoint(ready: Ready, folder: Path) -> Ready:
    """The job with its checkpoint's batch size, in place of a search for ``data.batch_size=auto``."""
    data = store.about(folder).config.get("data", {})
    ready = ready.with_batch_size(int(data.get("batch_size", 0)) or FIRST_TRY)
    return ready.with_plan(remarks={"why": {**ready.plan.remarks.why, "batch_size": f"as in {folder.name}"}})


def _in_its_precision(ready: Ready, folder: Path) -> Ready:
    """The job with its checkpoint's precision, where ``precision=auto`` could be that on this machine's GPUs."""
    if ready.checked.config.precision != "auto" or ready.checked.device != "cuda":
        return ready
    return ready.with_model(precision_before=(store.about(folder).precision, folder.name))


def _checkpoint(config: RunConfig, plan: Plan) -> Path | None:
    """Find the checkpoint from which a job resumes; None if it starts anew.

    Raises:
        UserError: it cannot.
    """
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:  # a damaged checkpoint is found twice, if copies are searched as well
            say(line)
        said.add(line)

    run_dir = Path(plan.paths.run_dir)
    if plan.topology.least_nnodes and plan.topology.node_rank:
        return None  # host 0 names the checkpoint, when the hosts have met
    goes_on = config.resume.path not in (None, FRESH)
    if goes_on and not (config.plan or plan.topology.node_rank):
        wait_for_the_life_before(run_dir, say_once)

    def folder_of(run_id: str) -> Path:
        from trainer.tracking import run_lookup

        return run_lookup.folder_of(config.tracking, run_id)

    if config.checkpoint.to is None and "://" not in (config.resume.path or ""):
        return find_checkpoint(config, run_dir, say_once, folder_of)
    from trainer.job.fetch_checkpoints import check_copies, fetched

    config = fetched(config, plan, say_once)
    folder = find_checkpoint(config, run_dir, say_once, folder_of)
    check_copies(config, plan, folder)
    return folder
