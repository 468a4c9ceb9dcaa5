"""The jobs of a sweep that an engine runs: how they have ended, and what becomes of them if it does not begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import sweep_table
from trainer.job.result import Result, read_result
from trainer.launch.engines.contract import ENGINE, WITHOUT_FAULT, Unreachable
from trainer.launch.engines.engine_folder import read_code

if TYPE_CHECKING:
    from trainer.launch.engines.contract import Handle
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
