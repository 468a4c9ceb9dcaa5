"""Reads a checkpoint of another run, which goes on and removes its older ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.durable_folder import marker_of
from trainer.checkpoint.store import CHECKPOINTS
from trainer.errors import RunFailed


@contextmanager
def not_removed_meanwhile(resume: str, run_dir: Path) -> Iterator[None]:
    """Context manager: a checkpoint that is read is whole from the beginning to the end, unless it is the run's own.

    Args:
        resume: its folder; empty: none is read. run_dir: of the run that reads.

    Raises:
        RunFailed: it was removed meanwhile; what was read of it may be a part.
    """
    folder, error = Path(resume), None
    if not resume or folder.parent == run_dir / CHECKPOINTS:
        yield
        return
    marker = marker_of(folder)
    try:
        yield
    except Exception as raised:
        error = raised
    if not marker or marker_of(folder) != marker:
        why = "the run that wrote this checkpoint has removed it since it was found (checkpoint.keep_last)"
        raise RunFailed(
            f"resume={folder}: {why}. Type instead: resume={folder.parent.parent}, whose newest is then taken"
        ) from error
    if error is not None:
        raise error
