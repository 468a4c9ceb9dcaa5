"""Lists and checks the points of a sweep, and finds the overrides that a point does not accept."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.arguments import typed_keys
from trainer.cli.explain import sentences
from trainer.cli.submitters import submitter_of
from trainer.config.keys import key_of
from trainer.config.redact import command
from trainer.errors import UserError
from trainer.host.text_checks import check_text
from trainer.job.check import get_ready
from trainer.job.ready import Ready
from trainer.job.result import read_result
from trainer.planning.find_checkpoint import FRESH, GO_ON
from trainer.terminal import streams

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

BY_NUMBER = "'hydra.sweep.subdir=${hydra.job.num}'"
"""The default names of the jobs' folders."""

OWN_FILES = (
    *("multirun.yaml", "sweep.csv", "report.html", "metrics.jsonl", "tracking.json", "sent.jsonl", "study.log"),
    *("sweep_curves.png", "sweep_parallel.png", "sweep_throughput.png", "sweep_importance.png", "swept.json"),
)
"""Files that a sweep writes beside the jobs' folders."""


@dataclass(frozen=True)
class SweepJob:
    """A point of a sweep: a job that has passed every check.

    Attributes:
        overrides: those of the sweep's overrides that the job accepts.
        config: composed by Hydra. ready: the checked job.
        subdir: the job's folder, relative to the sweep's.
    """

    overrides: list[str]
    config: DictConfig
    ready: Ready
    subdir: str


def expand(master: DictConfig) -> list[list[str]]:
    """The overrides of each job of a sweep, from Hydra's basic sweeper."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    swept: Any = OmegaConf.to_container(master.hydra.sweeper.params) if master.hydra.sweeper.params else {}
    params = [f"{key}={values}" for key, values in swept.items()]
    typed: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)  # ${oc.env:NAME} stays as it is
    overrides = OverridesParser.create().parse_overrides([*params, *typed])
    return [list(job) for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


def check_points(
    app: Hydra,
    master: DictConfig,
    jobs: list[list[str]],
    as_new: bool = False,
    on_first: Callable[[SweepJob], None] = lambda point: None,
) -> list[SweepJob]:
    """Check every point of a sweep, each without the overrides that only other points accept, and all together.

    Args:
        as_new: without regard to checkpoints in the jobs' folders, where the jobs of an engine are at work.
        on_first: called when the first point is checked, and others are not.

    Raises:
        UserError: a point cannot run, two are equal or share a folder, or no point accepts an override.
    """
    points: list[SweepJob] = []
    refusals: list[dict[str, UserError]] = []
    kept = _decisive(jobs)
    for number, job in enumerate(jobs):
        if "verbosity=quiet" not in job:
            streams.wait_for(f"checking job {number + 1} of {len(jobs)}")
        try:
            point, errors = check_point(app, master, job, number, kept, as_new)
        except UserError as error:
            raise UserError(_in_job(error.what, job, jobs), error.why, error.instead) from error
        points.append(point)
        refusals.append(errors)
        if number == 0 and len(jobs) > 1:
            on_first(point)
    useless = {key_of(o): refused for errors in refusals for o, refused in errors.items()}
    for key, refused in useless.items():
        if all(key in map(key_of, errors) for errors in refusals):
            raise refused
    check_apart(points, jobs, compose.named_folder(master, "hydra.sweep.dir"))
    return points


def check_point(
    app: Hydra,
    master: DictConfig,
    job: list[str],
    number: int,
    kept: Collection[str] = (),
    as_new: bool = False,
    place: tuple[Path, str] | None = None,
) -> tuple[SweepJob, dict[str, UserError]]:
    """Check one point, without the overrides that it has no use for; returns it, and why each of those was left out.

    Args:
        kept: overrides that are not left out.
        place: the sweep's folder and the job's in it; None: as the config names them.

    Raises:
        UserError: it cannot run.
    """
    errors: dict[str, UserError] = {}
    while True:
        used = [o for o in job if o not in errors]
        try:
            point = _check_point(app, master, used, number, as_new, place)
        except UserError as error:
            if not (strange := _strange(used, error, kept)):
                raise
            errors |= dict.fromkeys(strange, error)
        else:
            listed = {o: error for error in point.ready.checked.lacks.errors for o in _strange(used, error, kept)}
            if not listed:
                break
            errors |= listed
    left_out = [f"{o}: {refused.why}" for o, refused in errors.items()]
    return replace(point, ready=point.ready.with_plan(remarks={"left_out": left_out})), errors


def check_apart(points: Sequence[SweepJob], jobs: list[list[str]], folder: Path) -> None:
    """Check that all points differ, in folders of their own.

    Raises:
        UserError: two points are equal or share a folder, or a folder contains another one or the sweep's files.
    """
    runs: dict[str, int] = {}
    owner: dict[str, int] = {}
    sweeps = os.path.realpath(folder)
    for number, point in enumerate(points):
        run = repr((point.ready.checked.config.plain(), point.ready.plan.remarks.left_out))
        if (other := runs.setdefault(run, number)) != number:
            raise UserError(_job(number, jobs), f"is the same run as {_job(other, jobs)}", "each value once")
        place = os.path.realpath(folder / point.subdir)
        if (other := owner.setdefault(place, number)) != number:
            why = f"would write over {_job(other, jobs)}: hydra.sweep.subdir names the folder {point.subdir} for both"
            raise UserError(_job(number, jobs), why, BY_NUMBER)
        if os.path.commonpath([place, sweeps]) == place:
            raise UserError(
                _job(number, jobs), f"would write into {place}, where the sweep has its own files", BY_NUMBER
            )
        way = [Path(place), *Path(place).parents]
        if file := next((p for p in way if (str(p.parent) == sweeps and p.name in OWN_FILES) or p.is_file()), None):
            raise UserError(_job(number, jobs), f"would have {file} as a folder, which is a file", BY_NUMBER)
    for place, number in owner.items():
        if above := [owner[parent] for parent in map(str, Path(place).parents) if parent in owner]:
            why = (
                f"would write into the folder of {_job(above[0], jobs)}: {points[number].subdir} is below "
                f"{points[above[0]].subdir}"
            )
            raise UserError(_job(number, jobs), why, BY_NUMBER)


def check_not_half_done(points: Sequence[SweepJob], folder: Path) -> None:
    """Refuse to train jobs that are done once more in a sweep that did not come to its end.

    Raises:
        UserError: some of its jobs are done, and some are not.
    """
    if any(one.ready.checked.config.mode != "train" or one.ready.checked.config.resume.path for one in points):
        return
    done = [i for i, one in enumerate(points) if read_result(str(folder / one.subdir), "", "").status == "done"]
    if done and len(done) < len(points):
        why = f"holds a sweep that did not come to its end: of {len(points)} jobs {len(done)} are done"
        raise UserError(f"hydra.sweep.dir={folder}", why, f"{GO_ON}, or another hydra.sweep.dir")


def _job(number: int, jobs: list[list[str]]) -> str:
    """A job's number, and the overrides in which it differs from others."""
    common = set.intersection(*map(set, jobs))
    own = [o for o in jobs[number] if o not in common]
    return f"job {number}" + (f" ({command(own)})" if own else "")


def _in_job(what: str, job: list[str], jobs: list[list[str]]) -> str:
    """An error's key, with the job in which it occurs."""
    others = [[o for o in one if o != what] for one in jobs]
    return f"{what} in {_job(jobs.index(job), others)}"


def _strange(overrides: list[str], error: UserError, kept: Collection[str]) -> list[str]:
    """The overrides that an error reports as useless beside the others, except ``kept``."""
    return [o for o in overrides if key_of(o) in error.unusable and o not in kept]


def _decisive(jobs: list[list[str]]) -> set[str]:
    """Overrides without which two points would be equal."""
    common = set.intersection(*map(set, jobs)) if jobs else set()
    swept = {o for job in jobs for o in job if o not in common}
    groups = {key_of(o) for o in swept}
    return {o for o in swept if not {key_of(o).partition(".")[0], "strategy"} & groups}


def _check_point(
    app: Hydra, master: DictConfig, overrides: list[str], number: int, as_new: bool, place: tuple[Path, str] | None
) -> SweepJob:
    """Check a job as it will run, in its own folder, whose checkpoints it may resume."""
    key = "hydra.sweep.dir"
    folder, whole = place[0] if place else compose.named_folder(master, key), compose.names_whole(master, key)
    with sentences(app, overrides):
        config = app.config_loader.load_sweep_config(master, overrides)
        subdir = _subdir(config, number)
        subdir = place[1] if place else subdir
        compose.place(config, folder / subdir)
        compose.check_sources(config)
        plain = compose.plain(config)
    if as_new and plain.get("mode") == "train":
        plain = {**plain, "resume": {**plain.get("resume", {}), "path": FRESH}}
    away = submitter_of(config) is not None
    ready = get_ready(plain, typed_keys(overrides), str(folder / subdir), key, above=folder, whole=whole, away=away)
    return SweepJob(overrides, config, ready, subdir)


def _subdir(config: DictConfig, number: int) -> str:
    """The name of a job's folder.

    Raises:
        UserError: it is not valid.
    """
    from omegaconf import OmegaConf, open_dict, read_write

    with read_write(config), open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    compose.place(config)
    name = OmegaConf.select(config, "hydra.sweep.subdir")
    what = f"hydra.sweep.subdir={'null' if name is None else name}"
    if name is None or not str(name).strip():
        raise UserError(what, "names no folder", BY_NUMBER)
    check_text(what, str(name), BY_NUMBER)
    return str(name)


def swept_keys(master: DictConfig) -> set[str]:
    """The config keys with several values, typed or in the sweeper's config."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    task: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)  # ${oc.env:NAME} stays as it is
    typed = OverridesParser.create().parse_overrides(task)
    own = master.hydra.sweeper.get("params") or {}
    return {str(o.key_or_group) for o in typed if o.is_sweep_override()} | {str(key).lstrip("+~") for key in own}
