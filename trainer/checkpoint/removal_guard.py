"""Guards the reading of another run's checkpoint, which that run may remove meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.durable_folder import marker_of
from trainer.checkpoint.store import CHECKPOINTS
from trainer.errors import RunFailed


@contextmanager
def not_removed_meanwhile(resume: str, run_dir: Path) -> Iterator[None]:
    """Context manager: the checkpoint that is read inside exists until the end; a run's own one is not checked.

    Args:
        resume: folder of the checkpoint; empty: none is read. run_dir: of the run that reads it.

    Raises:
        RunFailed: the checkpoint was removed meanwhile, so that only a part of it may have been read.
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
