"""Refuses features of Hydra that runs do not have, and says what to use instead."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.keys import key_of, spelled
from trainer.errors import UserError
from trainer.wording import quoted

if TYPE_CHECKING:
    from omegaconf import DictConfig

USED = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.output_subdir",
    "hydra.searchpath",
    "hydra.mode",
    "hydra.sweeper.params",
    "hydra.sweeper.max_batch_size",
    "hydra.job.config.override_dirname",
)
"""Keys of Hydra that work as in Hydra."""
ONE_AFTER_THE_OTHER = (
    "there is no such option here: a sweep runs its jobs one after the other, with sweep.parallel=N so many at a time, "
    "and with launch=queue as many as there are slots"
)
GRID = (
    "there is no such option here: a sweep takes every combination of the values that are typed, and with sweep=optuna "
    "those that a search chooses"
)
OWN_LOG = (
    "there is no such option here: a run prints to the screen and to workerlog.N in its folder, and configures no "
    "logging of Hydra's"
)
FEATURES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "hydra.job.env_set": (({},), "trainer sets no environment variables", "NAME=VALUE python -m trainer ..."),
    "hydra.job.env_copy": (
        ([],),
        "all processes of a run have the variables of this command",
        "without hydra.job.env_copy",
    ),
    "hydra.callbacks": (({}, None), "Hydra's callbacks are not called", "callbacks=[{_target_:my_package.MyCallback}]"),
    "hydra.job.chdir": (
        (False, None),
        "a run stays in the working folder, where its config's paths begin",
        "hydra.job.chdir=false",
    ),
    "hydra.job.name": (("trainer",), "a run is called by the key name", "name=NAME"),
    "hydra.verbose": ((False, None), "Hydra's loggers are off", "verbosity=debug"),
    "hydra.launcher._target_": (
        ("hydra._internal.core_plugins.basic_launcher.BasicLauncher",),
        ONE_AFTER_THE_OTHER,
        "launch=queue",
    ),
    "hydra.sweeper._target_": (("hydra._internal.core_plugins.basic_sweeper.BasicSweeper",), GRID, "sweep=optuna"),
}
"""By key: the values without effect, why others are refused, and what to type instead."""
OPTIONS = {
    "hydra/launcher": ("basic", ONE_AFTER_THE_OTHER),
    "hydra/sweeper": ("basic", GRID),
    "hydra/job_logging": ("none", OWN_LOG),
    "hydra/hydra_logging": ("none", OWN_LOG),
}
"""By group of Hydra: its only option here, and why there is no other."""


def check_typed(overrides: Sequence[str], sweep: bool) -> None:
    """Refuse typed overrides of Hydra that would have no effect, before Hydra composes a config.

    Raises:
        UserError: for the first one.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        key = key_of(key)
        if key in OPTIONS:
            if value != OPTIONS[key][0]:
                raise refused(key, value)
        elif key == "hydra.job.env_copy":  # Hydra would fail if the variable is missing
            raise UserError(override, *FEATURES[key][1:])
        elif sweep and key == "hydra.run.dir":
            why = "is for a single run; a sweep has a folder with one for each job"
            raise UserError(override, why, quoted(f"hydra.sweep.dir={value}"))
        elif not sweep and key.startswith("hydra.sweep"):
            why = "is for sweeps, and this is a single run"
            raise UserError(override, why, quoted(f"hydra.run.dir={value}") if key == "hydra.sweep.dir" else "-m")
        elif key.startswith(("hydra.", "hydra/")) and _is_hydras(key) and not _is_used(key):
            raise UserError(override, "trainer does not read this key of Hydra's", f"without {key}")


def refused(group: str, option: str) -> UserError:
    """The refusal of an option in a group of Hydra."""
    usual, why = OPTIONS[group]
    instead = {ONE_AFTER_THE_OTHER: "sweep.parallel=2", GRID: "sweep=optuna"}.get(why, f"{group}={usual}")
    return UserError(f"{group}={option}", why, instead)


def check_composed(config: DictConfig, sweep: bool) -> None:
    """Refuse features of Hydra that a composed config asks for, also from a file.

    Raises:
        UserError: for the first one.
    """
    from omegaconf import OmegaConf

    for key, (usual, why, instead) in FEATURES.items():
        found = OmegaConf.select(config, key, throw_on_missing=False)
        value = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        if value not in usual:
            shown = ",".join(map(str, value)) if isinstance(value, dict) else spelled(value)  # names without values
            raise UserError(f"{key}={shown}", why, instead)
    for place in map(str, config.hydra.searchpath):
        if "://" not in place.removeprefix("file://") and not os.path.isdir(place.removeprefix("file://")):
            raise UserError(f"hydra.searchpath: {place}", "there is no such folder", "hydra.searchpath=[file://FOLDER]")
    mode = str(getattr(config.hydra.mode, "name", config.hydra.mode))
    if mode != "None" and (mode == "MULTIRUN") != sweep:
        why = "a sweep is asked for by the flag -m" if not sweep else "is no sweep, and the flag -m asks for one"
        raise UserError(f"hydra.mode={mode}", why, "-m" if not sweep else "the command without -m")


def _is_hydras(key: str) -> bool:
    """Whether Hydra has a key; Hydra refuses unknown keys itself."""
    from hydra.conf import HydraConf

    node: Any = HydraConf
    for part in re.split("[./]", key)[1:]:
        inner = getattr(node, "__dataclass_fields__", None)
        if inner is None:  # it may have any key
            return True
        if part not in inner:
            return False
        node = inner[part].type
    return True


def _is_used(key: str) -> bool:
    return any(
        key == known or key.startswith(f"{known}.") for known in (*USED, *FEATURES, "hydra.launcher", "hydra.sweeper")
    )
