"""The MLflow run of a sweep, the parent of its jobs' runs: its description, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.cli import sweep_pictures, sweep_report, sweep_table
from trainer.config.keys import key_of
from trainer.config.redact import command, hide

if TYPE_CHECKING:
    from trainer.cli.sweep_state import SweepState
    from trainer.tracking.client import RecorderProcess
    from trainer.tracking.contract import TrackedRun

FLUSH_S = 10.0
"""Longest wait at the end of a sweep for points that MLflow does not have yet."""


def described(sweep: SweepState) -> TrackedRun:
    """The parent run of the jobs' runs; with ``resume=auto``, the earlier one of the sweep's folder."""
    from trainer.tracking.describe import describe, public
    from trainer.tracking.naming import sweep_name

    point = sweep.points[0].ready
    plan = point.plan.changed(paths={"run_dir": str(sweep.folder)}, resume=None)
    run = describe(point.checked.config, plan, [*sweep.flags, "-m", *sweep.overrides], None, "")
    return replace(
        run,
        name=sweep_name(public([*sweep.overrides, *sweep.space]), sweep.swept),
        params=_values(sweep),
        dataset=None,
        artifacts=["sweep.csv", sweep_report.FILE, *sweep_pictures.PICTURES],
        resumed=sweep.goes_on,
        mlflow={**run.mlflow, "models": {}},
    )


def _values(sweep: SweepState) -> dict[str, str]:
    """The values of each swept key, without secrets, as parameters of the sweep's MLflow run."""
    from trainer.tracking.describe import public

    values: dict[str, list[str]] = {}
    for override in public([*sweep.space, *(o for job in sweep.jobs for o in job)]):
        if key_of(override) in sweep.swept:
            values.setdefault(key_of(override), []).append(override.partition("=")[2])
    return {key: ",".join(dict.fromkeys(found)) for key, found in values.items()}


def close(sweep: SweepState, tracker: RecorderProcess, status: str, jobs: Sequence[sweep_table.Row]) -> None:
    """End the sweep's run, with its table."""
    from trainer.tracking.describe import NOTE

    repeat = f"python -m trainer {command([*sweep.flags, '-m', *sweep.overrides])}"
    sweep_table.leave_best(jobs, sweep.folder)
    note = sweep_table.note(sweep.points[0].ready.plan.paths.name, jobs, sweep.swept, repeat, sweep.folder)
    tracker.close(sweep.folder, status, hide({NOTE: note}), FLUSH_S)
