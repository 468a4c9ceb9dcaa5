"""The jobs of a sweep that an engine runs: how they have ended, and what becomes of them if it does not begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import sweep_table
from trainer.cli.submitters import submitter_of
from trainer.host.engine_tasks import ENGINE
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import WITHOUT_FAULT, Unreachable
from trainer.launch.engines.engine_folder import SUBMITTED_JOB, read_code

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.launch.engines.contract import Handle, Living
    from trainer.launch.engines.contract import Job as EngineJob

    Submitted = tuple[EngineJob, Handle]

SUBMITTED = "submitted"
"""The status of a job that nobody follows (``launch.wait=false``)."""


@contextlib.contextmanager
def cancelled_while_held(submitted: Submitted | None) -> Iterator[None]:
    """Context manager: a job that was not released is cancelled at the end, whatever has happened."""
    try:
        yield
    finally:
        if submitted is not None and submitted[1].held:
            with contextlib.suppress(Unreachable):
                submitted[1].cancel()


def of_engine(folder: Path, status: str) -> Result:
    """The result of a job of a sweep that an engine has run.

    Args:
        status: of a job that has begun, and has left none.
    """
    if status == SUBMITTED:
        return replace(read_result(str(folder), SUBMITTED, ""), run_dir=str(folder))
    code = read_code(folder / ENGINE)
    if code in (None, *WITHOUT_FAULT) and not (folder / "config.yaml").exists():
        return Result(sweep_table.NOT_STARTED, str(folder))
    status = "failed" if code not in (None, *WITHOUT_FAULT) else status
    return replace(read_result(str(folder), status, "it has not ended"), run_dir=str(folder))


def living_of(master: DictConfig, folder: Path, words: Sequence[str]) -> Living | None:
    """The array of an engine that this command follows in place of a new one.

    Raises:
        UserError: another job of an engine lives in the sweep's folder: both would write the same files.
    """
    found = {path.parent for path in folder.glob(f"**/{ENGINE}/{SUBMITTED_JOB}")} - {folder / ENGINE}
    if master.get("plan") or (launcher := submitter_of(master)) is None or launcher.options.dry_run:
        return None
    from trainer.cli.submit import SWEEP_DIR, living_job

    return living_job(launcher, [folder / ENGINE, *sorted(found)], SWEEP_DIR, words)
