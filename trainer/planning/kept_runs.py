"""Refuses to write over what a run's folder holds to go on from, unless ``resume=fresh`` is typed."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.terminal.status import read_status
from trainer.wording import typed

AUTO, FRESH = "auto", "fresh"
RUN_DIR = "hydra.run.dir"
ELSEWHERE = "another hydra.run.dir (or resume=fresh to write over it)"
GO_ON = "resume=auto to go on (or resume=fresh to write over it)"


def own(folder: Path, run_dir: Path) -> Path | None:
    """A checkpoint's path in the run's own folder, by whichever way its path leads there; None: it lies elsewhere."""
    real, checkpoints = Path(os.path.realpath(folder)), run_dir / store.CHECKPOINTS
    if checkpoints.is_dir() and real.parent.is_dir() and real.parent.samefile(checkpoints):
        return checkpoints / real.name
    return None


def check_nothing_lost(config: RunConfig, run_dir: Path, source: Path | None) -> None:
    """A run that clears its folder finds nothing there that could go on.

    Called before anything is written, and again while the run holds its folder alone: it may have waited for another
        run's end.

    Args:
        source: the checkpoint from which the run goes on; None: it begins.

    Raises:
        UserError: the folder holds checkpoints of an unfinished run, or with resume=auto of any run.
    """
    if config.resume.path == FRESH or (source is not None and own(source, run_dir) is not None):
        return
    if not (there := store.remains(run_dir / store.CHECKPOINTS)):
        return
    newest, done = there[0].name, read_status(run_dir).get("state") == "done"
    if config.mode == "train" and config.resume.path == AUTO:
        why = f"another command has begun a run here meanwhile; its newest checkpoint is {newest}"
        raise UserError(f"hydra.run.dir={run_dir}", why, "the same command once more")
    if not done:
        why = f"holds a run that did not come to its end; its newest checkpoint is {newest}"
        raise UserError(f"hydra.run.dir={run_dir}", why, instead(config))


def instead(config: RunConfig) -> str:
    """What to type where a run that could go on would be written over."""
    if config.mode != "train":
        return ELSEWHERE
    return GO_ON if config.resume.path is None else "resume=auto to go on with that run, or another hydra.run.dir"


def check_still_newest(config: RunConfig, run_dir: Path, source: Path) -> None:
    """Of the run's own checkpoints the one to go on from is there and, with resume=auto, still the newest whole one.

    Raises:
        UserError: another command has gone on from it since it was looked for.
    """
    store.check(source, verify=False, but=store.BEST)
    step = store.about(source).step
    newer = [path for path in store.found(run_dir / store.CHECKPOINTS) if store.step_of(path.name) > step]
    if config.resume.path == AUTO and any(store.is_whole(path, verify=True) for path in newer):
        why = f"another command has gone on here meanwhile; its newest checkpoint is {newer[0].name}"
        raise UserError(f"hydra.run.dir={run_dir}", why, "the same command once more")


def check_name(asked: str, folder: Path, run_dir: Path) -> None:
    """A run goes on in its own folder from a checkpoint called step-N; others are of a training that was given up, or
    copies.

    Raises:
        UserError: it has another name.
    """
    mine = own(folder, run_dir)
    if mine is None or store.NAME.fullmatch(mine.name.removesuffix(".previous")):
        return
    why = "is of a training that was given up" if mine.name.startswith(store.GIVEN_UP) else "is not called step-N"
    raise UserError(
        f"resume={asked}",
        f"{why}, and a run goes on in its own folder from a step-N alone",
        f"{typed('resume', asked)} hydra.run.dir=ANOTHER_FOLDER",
    )
