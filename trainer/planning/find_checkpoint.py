"""Finds the checkpoint from which a run resumes, and refuses to overwrite a run that could go on, unless
``resume=fresh`` is typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.plan import Plan
from trainer.run_folder import lives
from trainer.terminal.status import read_status
from trainer.wording import typed

AUTO, FRESH = "auto", "fresh"
RUN_DIR = "hydra.run.dir"
ELSEWHERE = "another hydra.run.dir (or resume=fresh to write over it)"
GO_ON = "resume=auto to go on (or resume=fresh to write over it)"
RUN_ID = re.compile(r"[0-9a-f]{32}")
"""An MLflow run's id."""
YES_OR_NO = ("true", "false", "yes", "no", "1", "0")


def find_checkpoint(
    config: RunConfig, run_dir: Path, say: Callable[[str], None], folder_of: Callable[[str], Path]
) -> Path | None:
    """Find the checkpoint that ``resume.path`` names; None if the run starts anew.

    Args:
        folder_of: the run's folder of an MLflow run id.

    Raises:
        UserError: there is none, or a run that could go on would be written over.
    """
    folder = _checkpoint(config, run_dir, say, folder_of)
    check_nothing_lost(config, run_dir, folder)
    return folder


def _checkpoint(
    config: RunConfig, run_dir: Path, say: Callable[[str], None], folder_of: Callable[[str], Path]
) -> Path | None:
    """The checkpoint that ``resume.path`` names; None: there is none to look for, or none yet."""
    path = config.resume.path
    if config.mode != "train" or path is None or path == FRESH:
        return None
    if path.lower() in YES_OR_NO:
        raise UserError(
            f"resume={path.lower()}",
            "says where from: auto, a folder, an MLflow run id, or fresh",
            f"{RUN_DIR}=FOLDER resume=auto",
        )
    if path == AUTO:
        if (newest := store.newest_to_go_on(run_dir / store.CHECKPOINTS, say)) is None:
            say(f"resume=auto: there is no checkpoint in {run_dir / store.CHECKPOINTS}; the run begins")
        return newest
    if RUN_ID.fullmatch(path) and not Path(path).exists():
        folder = _named(path, folder_of(path), say)
    else:
        folder = _named(path, Path(path).expanduser().absolute(), say)
    _check_name(path, folder, run_dir)
    return folder


def _named(asked: str, path: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint in ``path``, or the newest one of the run in ``path``.

    Args:
        asked: what was typed.

    Raises:
        UserError: it is none.
    """
    if (path / store.ABOUT).is_file():
        return store.check(path)
    for checkpoints in (path, path / store.CHECKPOINTS):
        if (folder := store.newest_whole(checkpoints, say)) is not None:
            return folder
    raise UserError(
        f"resume={asked}", f"there is no whole checkpoint in {path}", "resume=FOLDER of a run or of a checkpoint"
    )


def own(folder: Path, run_dir: Path) -> Path | None:
    """A checkpoint's path in the run's own folder, whichever links lead there; None: it is elsewhere."""
    real, checkpoints = Path(os.path.realpath(folder)), run_dir / store.CHECKPOINTS
    if checkpoints.is_dir() and real.parent.is_dir() and real.parent.samefile(checkpoints):
        return checkpoints / real.name
    return None


def check_nothing_lost(config: RunConfig, run_dir: Path, source: Path | None) -> None:
    """Refuse to clear a run folder whose run could go on.

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
    """What to type if a run that could go on would be overwritten."""
    if config.mode != "train":
        return ELSEWHERE
    return GO_ON if config.resume.path is None else "resume=auto to go on with that run, or another hydra.run.dir"


def check_still_newest(config: RunConfig, run_dir: Path, source: Path) -> None:
    """Refuse to resume if another command went on in this folder meanwhile: the checkpoint must exist and, with
    resume=auto, be the newest whole one.

    Raises:
        UserError: another command has gone on from it since it was looked for.
    """
    store.check(source, verify=False, but=store.BEST)
    step = store.about(source).step
    newer = [path for path in store.found(run_dir / store.CHECKPOINTS) if store.step_of(path.name) > step]
    if config.resume.path == AUTO and any(store.is_whole(path, verify=True) for path in newer):
        why = f"another command has gone on here meanwhile; its newest checkpoint is {newer[0].name}"
        raise UserError(f"hydra.run.dir={run_dir}", why, "the same command once more")


def _check_name(asked: str, folder: Path, run_dir: Path) -> None:
    """Refuse to resume a run in its own folder from anything but a step-N: other names are copies, or were given up.

    Raises:
        UserError: it has another name.
    """
    own_path = own(folder, run_dir)
    if own_path is None or store.NAME.fullmatch(own_path.name.removesuffix(".previous")):
        return
    why = "is of a training that was given up" if own_path.name.startswith(store.GIVEN_UP) else "is not called step-N"
    raise UserError(
        f"resume={asked}",
        f"{why}, and a run goes on in its own folder from a step-N alone",
        f"{typed('resume', asked)} hydra.run.dir=ANOTHER_FOLDER",
    )


def can_go_on(config: RunConfig, plan: Plan) -> bool:
    """Whether nothing is lost if the run ends now and the same command is given again.

    This is so if nothing is trained, before the first update, and if host 0 writes checkpoints into a folder that this
    host sees, or copies them to an address.
    """
    if config.mode != "train":
        return True
    if not config.saves_checkpoints:
        return not plan.topology.node_rank and not has_begun(Path(plan.paths.run_dir))
    is_copied = config.checkpoint.to is not None
    return is_copied or not plan.topology.node_rank or bool(lives.read(Path(plan.paths.run_dir)))


def has_begun(run_dir: Path) -> bool:
    """Whether the run has done an update in its current life; the status of an earlier life does not count."""
    status = read_status(run_dir)
    return status.get("state") == "running" and status.get("life") == lives.number(run_dir)
