"""``precision=auto`` on a GPU: measures the precisions that come into question, before a run that is long enough.

The measurement runs in a process of its own on the first worker's GPU, and is kept in the user's cache. A plan
(``plan=true``) measures nothing, and goes by what is kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.errors import RunFailed, UserError, first_line
from trainer.host import cache, files, hardware, json_text
from trainer.host.torchrun import is_rank
from trainer.job.batch_size_search import one_process_config
from trainer.job.ready import Ready
from trainer.planning.auto import Machine, precision_case
from trainer.planning.launcher import Assignment, Supervision, start_here
from trainer.planning.make_plan import without_fp16
from trainer.planning.precision import candidates
from trainer.run_folder.leftovers import TRIALS

ENTRY = "trainer.worker.precision_trial:trial"
NAME = "precisions.json"
MOST_KEPT = 200
LEAST_UPDATES = 500
"""A shorter run would wait longer for the measurement than it saves."""


def remembered(ready: Ready) -> Ready:
    """The job planned with what was measured for it before on such a GPU; itself, if nothing was."""
    if not _compared(ready):
        return ready
    speeds = _kept().get(_of(ready))
    return ready.with_model(speeds=speeds) if speeds else ready


def measured(ready: Ready, say: Callable[[str], None]) -> Ready:
    """The job planned with the speeds of this machine's GPU, where they decide on its precision.

    Args:
        say: shows a line to the user.
    """
    precisions = _compared(ready)
    if not precisions or ready.model.speeds or ready.plan.length.total_steps < LEAST_UPDATES:
        return ready
    try:
        speeds = _tried(ready, precisions)
    except (RunFailed, OSError) as error:
        say(f"precision=auto: {ready.plan.chosen.precision} by the rules, because a trial failed: {first_line(error)}")
        return ready
    with suppress(OSError, UserError):
        kept = {**dict(list(_kept().items())[-MOST_KEPT:]), _of(ready): speeds}
        cache.make(cache.cache_root())
        files.replace_file(cache.cache_root() / NAME, json.dumps(kept), private=True)
    return ready.with_model(speeds=speeds)


def _compared(ready: Ready) -> list[str]:
    """The precisions to compare; none where nobody asks, or where several hosts have to agree."""
    checked, plan = ready.checked, ready.plan
    config = checked.config
    asks = config.precision == "auto" and config.mode == "train" and not ready.model.precision_before[0]
    here = config.launch.nnodes == 1 and not checked.elsewhere and not plan.topology.launcher and not is_rank()
    if not asks or not here or config.launch.role is not None or isinstance(checked.facts.shape, dict):
        return []
    case = precision_case(config, checked.device, ready.model, Machine.here(), checked.nproc, without_fp16(checked))
    found = candidates(case)
    return found if len(found) > 1 else []


def _tried(ready: Ready, precisions: list[str]) -> dict[str, float]:
    """Measure in a process of its own.

    Raises:
        RunFailed: it cannot.
    """
    from trainer.worker.precision_trial import TRIAL

    folder, plan = Path(ready.plan.paths.run_dir) / TRIALS, ready.plan
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / TRIAL).write_text(json.dumps(precisions))
    config = ready.checked.config.changed(
        callbacks=[], profile=False, verbosity="quiet", **one_process_config(ready.checked.config)
    )
    first = next(process for process in plan.topology.here if process.role == "worker")
    alone = plan.changed(
        paths={"run_dir": str(folder)},
        strategy={"entries": {"worker": ENTRY}},
        topology={"roles": {"worker": 1}, "processes": [first], "restarts": 0},
    )
    assignment: Assignment = replace(ready.assignment, config=config, plan=alone, resume="")
    try:
        outcome = start_here(assignment, Supervision())
        return {name: float(speed) for name, speed in outcome.get("speeds", {}).items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kept() -> dict[str, dict[str, float]]:
    try:
        path = cache.cache_root() / NAME
        cache.check_data(path)
        return dict(json_text.read_object(path))
    except (OSError, ValueError, UserError):
        return {}


def _of(ready: Ready) -> str:
    """A fingerprint of all that a measurement depends on."""
    config, plan, gpus = ready.checked.config, ready.plan, hardware.gpus()
    facts = [
        dict(config.model),
        {name: list(shape) for name, shape in ready.model.shapes.items()},
        ready.checked.facts.shape,
        plan.batches.size,
        [gpus[0].name, gpus[0].memory] if gpus else [],
        importlib.metadata.version("torch"),
        bool(config.execution.deterministic),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
