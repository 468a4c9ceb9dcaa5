"""Lists and checks the points of a sweep, and finds which of the sweep's overrides a point cannot take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.arguments import typed_keys
from trainer.cli.explain import sentences
from trainer.config.keys import key_of
from trainer.config.redact import command
from trainer.errors import UserError
from trainer.job.ready import Ready, get_ready

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

LeftOut = dict[tuple[str, ...], list[str]]
"""By the overrides of a sweep's point, those that it has no use for."""


def expand(master: DictConfig) -> list[list[str]]:
    """The overrides of each job of a sweep, from Hydra's basic sweeper; empty for other sweepers."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    if "BasicSweeper" not in str(master.hydra.sweeper._target_):
        return []
    swept: Any = OmegaConf.to_container(master.hydra.sweeper.params) if master.hydra.sweeper.params else {}
    params = [f"{key}={values}" for key, values in swept.items()]
    typed: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)  # ${oc.env:NAME} stays as it is
    overrides = OverridesParser.create().parse_overrides([*params, *typed])
    return [list(job) for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


def check_points(app: Hydra, master: DictConfig, jobs: list[list[str]]) -> tuple[list[Ready], LeftOut]:
    """Check every point of a sweep, each without the overrides that only other points can take.

    Returns:
        The points, and by the overrides of each those that it leaves out.

    Raises:
        UserError: a point cannot run, or no point has a use for an override.
    """
    points: list[Ready] = []
    left_out: LeftOut = {}
    refusals: dict[str, UserError] = {}
    kept = _decisive(jobs)
    for number, job in enumerate(jobs):
        mine: dict[str, UserError] = {}
        while True:
            used = [o for o in job if o not in mine]
            try:
                ready = _check_point(app, master, used, number)
            except UserError as error:
                if not (strange := _strange(used, error, kept)):
                    raise UserError(_in_job(error.what, job, jobs), error.why, error.instead) from error
                mine |= dict.fromkeys(strange, error)
            else:
                listed = {o: error for error in ready.checked.lacks.errors for o in _strange(used, error, kept)}
                if not listed:
                    break
                mine |= listed
        ready.plan = replace(ready.plan, left_out=[f"{o}: {refused.why}" for o, refused in mine.items()])
        points.append(ready)
        left_out[tuple(job)] = list(mine)
        refusals |= {key_of(o): refused for o, refused in mine.items()}
    for key, refused in refusals.items():
        if all(key in map(key_of, left) for left in left_out.values()):
            raise refused
    return points, left_out


def _in_job(what: str, job: list[str], jobs: list[list[str]]) -> str:
    """What is wrong, and in which job: its number, and what it has that others have not."""
    common = set.intersection(*map(set, jobs))
    own = [o for o in job if o not in common and o != what]
    return f"{what} in job {jobs.index(job)}" + (f" ({command(own)})" if own else "")


def _strange(overrides: list[str], error: UserError, kept: set[str]) -> list[str]:
    """Those of the overrides that a refusal calls of no use beside the others, but for some that are kept."""
    return [o for o in overrides if key_of(o) in error.unusable and o not in kept]


def _decisive(jobs: list[list[str]]) -> set[str]:
    """Overrides that are swept over while the options that have a use for them stay: left out, two points were the same."""
    common = set.intersection(*map(set, jobs)) if jobs else set()
    swept = {o for job in jobs for o in job if o not in common}
    groups = {key_of(o) for o in swept}
    return {o for o in swept if not {key_of(o).partition(".")[0], "strategy"} & groups}


def _check_point(app: Hydra, master: DictConfig, overrides: list[str], number: int) -> Ready:
    """Check a job as it will run, in its own folder, from whose checkpoints it may resume."""
    with sentences(app, overrides):
        config = app.config_loader.load_sweep_config(master, overrides)
    key = "hydra.sweep.dir"
    folder, whole = compose.named_folder(master, key), compose.names_whole(master, key)
    mine = folder / _subdir(config, number)
    return get_ready(compose.plain(config), typed_keys(overrides), str(mine), key, above=folder, whole=whole)


def _subdir(config: DictConfig, number: int) -> str:
    """The name of a job's folder, which Hydra makes out in the same way when the job begins."""
    from omegaconf import OmegaConf, open_dict, read_write

    with read_write(config), open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    return str(OmegaConf.select(config, "hydra.sweep.subdir"))


def swept_keys(master: DictConfig) -> set[str]:
    """The config keys in which the points of a sweep differ: those with several values, typed or in the sweeper's config."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    typed = OverridesParser.create().parse_overrides(list(master.hydra.overrides.task))
    own = master.hydra.sweeper.get("params") or {}
    return {str(o.key_or_group) for o in typed if o.is_sweep_override()} | {str(key).lstrip("+~") for key in own}
