"""The checkpoints of a run: a sealed folder for each, which of them is the newest whole one, and which are kept.

Names in ``checkpoints/``, and who moves a checkpoint from one to the next:

    step-N[.LIFE].partial   being written by all processes of a life (``writer``); each file has its seal beside it
    step-N                  complete: one process, of the first worker, has checked all seals and written ``COMPLETE``
    step-N.previous         an older step-N that stepped aside for the new one; counts until the new one is in place
    aside-step-N            given up: a run went on from an older checkpoint (:func:`set_aside_newer`)
    latest                  the name of the newest, for people; resuming reads the folders themselves

:func:`retire` removes step-N by renaming it to step-N.partial first; :func:`forget_unfinished` removes the rest.

What always holds: a folder with ``COMPLETE`` has all files that ``COMPLETE`` lists, each with its size and checksum, or
is reported as damaged and passed over. Whenever the machine stops, the newest checkpoint that was complete is found.
Files of parts may be hard links to those of older checkpoints; no file of a complete checkpoint is written again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer.checkpoint import durable_folder
from trainer.errors import UserError, why
from trainer.host import files, json_text
from trainer.wording import quoted

FORMAT = 1
GIVEN_UP = "aside-"
ABOUT, LATEST = "checkpoint.json", "latest"
BEST = "best.safetensors"
"""The best weights so far: in ``checkpoints/`` those of the run, in a checkpoint those of its time."""
SKELETON = "skeleton.pkl"
"""In the run folder: the user's own model without weights."""
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
NAME = re.compile(r"step-(\d{9,})")
ASIDE = re.compile(r"(step-\d{9,})(?:\.[0-9a-f]{16})?\.(partial|previous)")
UNNAMED = re.compile(rf"{LATEST}\.\d+\.tmp")
"""A rest of ``latest`` after a death or on a full disk."""
OF_GIVEN_UP = re.compile(rf"{GIVEN_UP}step-\d{{9,}}")
PERSISTABLES = re.compile(r"persistables\.by-\d+\.partial")
"""Parts of incomplete persistables."""
FILE = re.compile(r"(worker|server|full)-\d+\.safetensors|best\.safetensors|(checkpoint|index)\.json|COMPLETE")
"""Files of a checkpoint."""
LINKED = "full-*.safetensors"
"""Full parts beside increments; they may be links to files of older checkpoints."""
PART = re.compile(r"worker-(\d+)\.safetensors")


@dataclass(frozen=True)
class BestMetric:
    """The metric that marks the best model.

    Attributes:
        value: after this checkpoint's update; None: it was not measured then. falls: less is better.
    """

    metric: str
    value: float | None
    falls: bool

    @property
    def worth(self) -> float:
        """The value as a score: more is better."""
        if self.value is None or math.isnan(self.value):
            return float("-inf")
        return -self.value if self.falls else self.value


@dataclass(frozen=True)
class About:
    """The content of ``checkpoint.json``.

    Attributes:
        step: updates done. epoch, update: the epoch in which the run goes on, and updates done in it.
        samples: trained on so far. points: bytes of metrics.jsonl at that time.
        watched: the metric that marks the best model.
        config: of the run, without secrets. strategy, workers, servers, global_batch_size, total_steps: of its plan.
        versions: of Python, the trainer and the packages that wrote the checkpoint.
        precision: of the forward pass, never ``auto``. lease_batches: batches in a leased block.
        best_step: update of the best weights so far; 0: there are none yet.
        data: fingerprint of the data; empty: their source has none.
        run_id: of the MLflow run; empty: it is not tracked, or had no id yet.
        updates: of the reporting worker; None: ``step``. With leased work each worker has a number of its own.
    """

    step: int
    epoch: int
    update: int
    samples: int
    points: int
    watched: BestMetric
    config: dict[str, Any]
    strategy: str
    workers: int
    global_batch_size: int
    total_steps: int
    versions: dict[str, str]
    precision: str
    servers: int = 0
    lease_batches: int = 0
    best_step: int = 0
    data: str = ""
    run_id: str = ""
    updates: int | None = None

    @property
    def done(self) -> int:
        """Updates of the reporting worker."""
        return self.step if self.updates is None else self.updates


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` updates."""
    return checkpoints / f"step-{step:09d}"


def step_of(name: str) -> int:
    """The number of updates in the name of a checkpoint's folder; -1: the name is another."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else -1


def part_of(worker: int) -> str:
    """The name of a worker's file."""
    return f"worker-{worker}.safetensors"


def parts(folder: Path) -> list[str]:
    """The names of the workers' files in a checkpoint, in the order of the ranks; lost workers have none."""
    numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := PART.fullmatch(path.name)))
    return [part_of(number) for number in numbers]


def found(checkpoints: Path) -> list[Path]:
    """The folders of checkpoints, whole or damaged, the newest first.

    A ``step-N.previous`` whose replacement is missing counts as step-N (:func:`check` finds it).
    """
    folders = [path.name for path in _entries(checkpoints) if path.is_dir()]
    names = {name.removesuffix(".previous") for name in folders}
    return [checkpoints / name for name in sorted(filter(NAME.fullmatch, names), key=step_of, reverse=True)]


def newest_whole(checkpoints: Path, say: Callable[[str], None] = lambda line: None, verify: bool = True) -> Path | None:
    """The newest undamaged checkpoint; None: there is none.

    Args:
        say: called with a line for each newer, damaged one. verify: see :func:`check`.
    """
    for folder in found(checkpoints):
        try:
            return check(folder, verify)
        except UserError as error:
            say(f"passed over: {error.what}: {error.why}")
    return None


def remains(checkpoints: Path) -> list[Path]:
    """The folders with any file of a checkpoint: the newest first, then those that were given up."""
    given_up = [path for path in _entries(checkpoints) if OF_GIVEN_UP.fullmatch(path.name) and path.is_dir()]
    return [
        folder
        for folder in (*found(checkpoints), *reversed(given_up))
        if not folder.is_dir() or any(FILE.fullmatch(path.name) for path in folder.iterdir())
    ]


def newest_to_go_on(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; None: there is no checkpoint yet.

    If none is whole, a checkpoint is returned of which only the best weights are damaged: links share them between
    checkpoints.

    Args:
        say: see :func:`newest_whole`.

    Raises:
        UserError: there are checkpoints, and none is whole. They are not written over: a failing disk may recover.
    """
    passed: list[str] = []
    newest = newest_whole(checkpoints, passed.append)
    for line in passed:
        say(line)
    if newest is not None or not (there := remains(checkpoints)):
        return newest
    if (newest := next((path for path in found(checkpoints) if is_whole(path, True, but=BEST)), None)) is not None:
        say(
            f"{newest} is taken all the same: only the best weights so far are damaged. They are lost, and "
            f"the next better ones are kept"
        )
        return newest
    why = (
        f"none of its checkpoints is whole ({passed[0]})"
        if passed
        else f"holds {there[0].name} alone, of a training that was given up"
    )
    raise UserError(str(checkpoints), why, "the same command when they can be read, or resume=fresh to write over them")


def all_in(path: Path) -> list[Path]:
    """Find the checkpoints of a run folder or of a folder of checkpoints, the newest first; or the named one alone.

    Raises:
        UserError: there is none.
    """
    path = path.expanduser().absolute()
    if NAME.fullmatch(path.name) and not path.is_file() and path in found(path.parent):
        return [path]
    for folder in (path / CHECKPOINTS, path):
        if there := found(folder):
            return there
    why = "there is no checkpoint in it" if path.is_dir() else "there is no such folder"
    raise UserError(str(path), why, "the folder of a run, e.g. outputs/RECIPE/TIME")


def one_in(path: Path, say: Callable[[str], None]) -> Path:
    """Find one undamaged checkpoint: the one that the path names, else the newest undamaged one of the run.

    Raises:
        UserError: there is none.
    """
    there = all_in(path)
    if len(there) == 1:
        return check(there[0])
    newest = newest_whole(there[0].parent, say)
    if newest is None:
        raise UserError(
            str(path), "none of its checkpoints is whole", f"python -m trainer.checkpoints verify {quoted(str(path))}"
        )
    return newest


def check(folder: Path, verify: bool = True, but: str = "") -> Path:
    """Check that a checkpoint is whole; returns its folder, which may be ``step-N.previous``.

    Args:
        verify: also compare each file's checksum; sizes are always compared.
        but: name of a file that is not checked.

    Raises:
        UserError: it is damaged; the error names the file.
    """
    try:
        whole = durable_folder.whole(folder, FORMAT, verify, but)
    except OSError as error:
        raise UserError(str(error.filename or folder), f"it cannot be read ({why(error)})") from error
    step = about(whole).step
    if step_of(folder.name) not in (-1, step):
        raise UserError(
            str(folder), f"it holds the checkpoint of update {step}", f"the name {folder_of(folder.parent, step).name}"
        )
    return whole


def about(folder: Path) -> About:
    """Read ``checkpoint.json``.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / ABOUT
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(str(path), f"it cannot be read ({why(error)})") from error
    return parse_about(text, str(path))


def parse_about(text: bytes, path: str) -> About:
    """Parse the content of a ``checkpoint.json``; keys of newer versions are ignored.

    Args:
        path: named in an error.

    Raises:
        UserError: it is not valid.
    """
    try:
        parsed = json_text.loads(text)
        found = About(
            **{**_known(About, parsed), "watched": BestMetric(**_known(BestMetric, parsed.get("watched", {})))}
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(path, f"it cannot be read ({why(error)})") from error
    counts = ("step", "epoch", "update", "samples", "points", "workers", "global_batch_size", "total_steps")
    others = isinstance(found.best_step, int) and isinstance(found.updates, (int, type(None)))
    if not (others and all(type(count := getattr(found, name)) is int and count >= 0 for name in counts)):
        raise UserError(path, "it tells a number that is none")
    value, texts = found.watched.value, (found.strategy, found.precision, found.data, found.run_id)
    if not isinstance(value, (int, float, type(None))) or not all(isinstance(text, str) for text in texts):
        raise UserError(path, "it tells a value of another kind")
    if not isinstance(found.config, dict) or not isinstance(found.versions, dict):
        raise UserError(path, "it does not tell the config")
    if not all(isinstance(version, str) for version in found.versions.values()):
        raise UserError(path, "it tells a version that is none")
    return found


def _known(kind: type[Any], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``kind`` in ``parsed``."""
    return {field.name: parsed[field.name] for field in fields(kind) if field.name in parsed}


def complete(folder: Path, names: Sequence[str]) -> None:
    """Complete a checkpoint whose parts are written, and point ``latest`` to the newest one.

    Raises:
        UserError: a file is missing or damaged.
    """
    linked = [path.name for path in sorted(durable_folder.partial_of(folder).glob(LINKED))]
    beside = [name for name in (*linked, BEST) if durable_folder.is_written(folder, name)]
    durable_folder.complete(folder, [ABOUT, *names, *beside], FORMAT, durable_folder.final_folder(folder))
    try:
        durable_folder.durable_text(folder.parent / LATEST, found(folder.parent)[0].name + "\n")
    except OSError:  # resuming reads the folders; a wrong ``latest`` would mislead people
        durable_folder.remove(folder.parent / LATEST)


def retire(checkpoints: Path, newest: Path, last: int, best: int) -> list[Path]:
    """Remove older checkpoints and unfinished ones; returns the removed checkpoints.

    Args:
        newest: a whole checkpoint, which stays.
        last: so many of the newest whole ones stay.
        best: so many with the best watched values stay. If all that stay share a linked file, the newest one without
            that file stays as well, in case the file is damaged.
    """
    older = [path for path in found(checkpoints) if (path / durable_folder.MARKER).is_file()]
    whole = [path for path in older if path == newest or is_whole(path)]
    kept = {newest, *whole[:last], *_best(whole, best)}
    if last > 1 and all(_share_a_file(path, newest) for path in kept):
        kept.update([path for path in whole if not _share_a_file(path, newest)][:1])
    gone = [path for path in older if path not in kept and path.name < newest.name]
    for path in gone:
        _remove(path)
    forget_unfinished(checkpoints, newest)
    return gone


def set_aside_newer(checkpoint: Path) -> None:
    """Before a run resumes from a checkpoint: rename newer ones to ``aside-step-N``, as they are given up."""
    step = about(checkpoint).step
    for path in found(checkpoint.parent):
        if step_of(path.name) <= step:
            continue
        aside = path.with_name(f"{GIVEN_UP}{path.name}")
        durable_folder.remove(aside)
        (path if path.is_dir() else durable_folder.previous_of(path)).rename(aside)


def forget_unfinished(checkpoints: Path, newest: Path | None = None) -> None:
    """Remove unfinished checkpoints of a run.

    Args:
        newest: only those before this one. None: all, also rests of persistables and of best weights; no process may
            write a checkpoint then (before the run resumes, and at its end).
    """
    for path in _entries(checkpoints):
        is_of_others = PERSISTABLES.fullmatch(path.name) or files.is_part(path)
        may_stay = newest is not None and (path.name >= newest.name or is_of_others)
        if not may_stay and _is_left(path):
            durable_folder.remove(path)


def _is_left(path: Path) -> bool:
    """Whether a path remains of an unfinished write or removal."""
    if UNNAMED.fullmatch(path.name) or PERSISTABLES.fullmatch(path.name):
        return True
    if part := files.PART.match(path.name):
        return part[1] == BEST
    if aside := ASIDE.fullmatch(path.name):
        return aside[2] == "partial" or (path.with_name(aside[1]) / durable_folder.MARKER).is_file()
    if not NAME.fullmatch(path.name) or not path.is_dir() or (path / durable_folder.MARKER).exists():
        return False
    return all(FILE.fullmatch(entry.name) for entry in path.iterdir())


def _remove(folder: Path) -> None:
    """Remove a checkpoint. After an interrupted removal, the rest has the name of an unfinished one."""
    durable_folder.begin(folder)
    os.rename(folder, durable_folder.partial_of(folder))
    durable_folder.begin(folder)


def is_whole(folder: Path, verify: bool = False, but: str = "") -> bool:
    """Whether a checkpoint is whole, by the sizes of its files; with ``verify`` also by their checksums.

    Args:
        but: name of a file that is not checked.
    """
    try:
        return check(folder, verify, but) == folder
    except UserError:
        return False


def _share_a_file(one: Path, other: Path) -> bool:
    """Whether two checkpoints share a linked file, without the best weights, which a run does not need."""
    own, others = ({path.stat().st_ino for path in of.iterdir() if path.name != BEST} for of in (one, other))
    return bool(own & others)


def _best(folders: Sequence[Path], count: int) -> list[Path]:
    """The ``count`` checkpoints with the best watched values."""
    watched_by_path = {path: about(path).watched for path in folders} if count else {}
    measured = [path for path, watched in watched_by_path.items() if watched.value is not None]
    return sorted(measured, key=lambda path: watched_by_path[path].worth, reverse=True)[:count]


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.is_symlink()) if folder.is_dir() else []
