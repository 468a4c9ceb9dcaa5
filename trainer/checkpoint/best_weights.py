"""The best weights of a run in its checkpoints: each checkpoint has those of its time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.store import BEST, CHECKPOINTS
from trainer.host.files import replacing
from trainer.terminal.status import read_status


class BestOfCheckpoints:
    """Puts the best weights so far into checkpoints, as hard links.

    On a file system without links they are copied in the background, from a file that is opened before the training
    goes on.
    """

    def __init__(self) -> None:
        self.sealed: tuple[tuple[int, int], dict[str, Any]] | None = None
        self.to_copy: BinaryIO | None = None

    def hold(self, folder: Path) -> None:
        """Link the best weights into the checkpoint to come, before the training goes on and finds better ones.

        Raises:
            OSError: the file system refuses it.
        """
        best, partial = folder.parent / BEST, durable_folder.partial_of(folder)
        if best.is_symlink() or not best.is_file() or partial.is_symlink():
            return
        durable_folder.make_folder(partial)
        durable_folder.seal_of(partial / BEST).unlink(missing_ok=True)
        (partial / BEST).unlink(missing_ok=True)
        try:
            os.link(best, partial / BEST)
        except OSError:
            self.to_copy = best.open("rb")

    def seal(self, folder: Path) -> None:
        """Seal the best weights, in the background. Weights that are in the last checkpoint too are not read again.

        Raises:
            OSError: the file system refuses it.
        """
        path = durable_folder.partial_of(folder) / BEST
        if self.to_copy is not None:
            source, self.to_copy = self.to_copy, None
            with source, _whole(path), path.open("wb") as place:
                shutil.copyfileobj(source, place)
        if not path.is_file():
            return
        which = (path.stat().st_ino, path.stat().st_mtime_ns)
        if self.sealed is None or self.sealed[0] != which:
            self.sealed = which, durable_folder.fingerprint(path)
        durable_folder.adopt(folder, BEST, self.sealed[1])


def put_back(run_dir: Path, checkpoint: Path | None, say: Callable[[str], None]) -> None:
    """Before a run resumes from a checkpoint: restore the best weights of that time.

    Args:
        checkpoint: of this run or another; None: the run begins anew.
        say: called with a line about removed weights.
    """
    place, found = run_dir / CHECKPOINTS / BEST, None if checkpoint is None else _of(checkpoint)
    damaged = checkpoint is not None and found == checkpoint / BEST and _is_damaged(found, checkpoint)
    if found is None or damaged:
        if os.path.lexists(place):
            place.unlink()
            say(f"removed: {place}, {'damaged' if damaged else 'of a validation after the checkpoint'}")
        return
    if place.is_file() and place.samefile(found):
        return
    place.parent.mkdir(exist_ok=True)
    with replacing(place) as part:
        part.unlink()
        _link(found, part) if found.parent.parent == place.parent else shutil.copyfile(found, part)


def _is_damaged(held: Path, checkpoint: Path) -> bool:
    """Whether the best weights in a checkpoint differ from their seal."""
    try:
        return durable_folder.files(checkpoint, store.FORMAT).get(BEST) != durable_folder.fingerprint(held)
    except OSError:
        return True


def _of(checkpoint: Path) -> Path | None:
    """The best weights at the time of a checkpoint; None: there are none."""
    if (held := checkpoint / BEST).is_file():
        return held
    about, beside = store.about(checkpoint), checkpoint.parent / BEST
    if about.best_step == 0 or not beside.is_file() or checkpoint.name.startswith(store.GIVEN_UP):
        return None
    # They could not be put into the checkpoint, as on a full disk: the run's own ones, if they are of that update.
    best = read_status(checkpoint.parent.parent).get("best") or {}
    return beside if best.get("step") == about.best_step else None


def _link(source: Path, place: Path) -> None:
    """A link, or a copy on a disk without links."""
    try:
        os.link(source, place)
    except OSError:
        with _whole(place):
            shutil.copyfile(source, place)


@contextmanager
def _whole(place: Path) -> Iterator[None]:
    """Context manager: a failure removes the file, which may be incomplete."""
    try:
        yield
    except BaseException:
        place.unlink(missing_ok=True)
        raise
