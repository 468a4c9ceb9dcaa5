"""What a user of the API may override: a list of keys and a grammar of values, and nothing else.

A config is code: ``_target_`` names what is called, ``hydra.*`` names folders, ``launch.*`` can name commands, and a
path can name any file of the service's user. The operator decides over these in recipes and options; a user of the API
chooses among them, and sets numbers, switches and words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError, first_line

MOST, LONGEST = 100, 1000
"""Overrides of a run, and characters of one."""
GROUPS = ("model", "data", "sampler", "task", "loss", "optimizer", "scheduler", "strategy", "execution", "checkpoint")
"""Groups whose options a user may choose, and whose keys may be set but for those of ``REFUSED``."""
KEYS = (
    "epochs max_steps limit_train_batches limit_val_batches validation test seed precision device compile profile "
    "on_nonfinite max_rewinds weights tracking tracking.run_name launch.nproc launch.servers launch.workers "
    "launch.cores launch.gpus launch.memory launch.max_restarts launch.max_preemptions launch.hang_timeout_s"
).split()
SECTIONS = ("ema", "best", "early_stop")
REFUSED = ("checkpoint.to", "strategy.transport")
"""Keys of ``GROUPS`` that open ports or name addresses."""
TRACKING = ("none", "mlflow", "tensorboard")
KEY = re.compile(r"[a-z][a-z0-9_]*(?:\.[A-Za-z0-9][A-Za-z0-9_]*)*")
WORD = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_+. -]*(?:/[A-Za-z0-9_+-][A-Za-z0-9_+. -]*)*")
"""A word, or a path below the service's folder: no ``..``, no ``/`` at its beginning, no ``:``, no ``$``."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def check(overrides: Sequence[str], recipes: Collection[str], folder: Path) -> str:
    """Check what a user of the API has typed; returns the name of the recipe.

    Args:
        recipes: those of the configured folders. folder: the service's; paths lead from there.

    Raises:
        UserError: the first override that is not allowed, and what is.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException

    if len(overrides) > MOST:
        raise UserError("overrides", f"are more than {MOST}")
    recipe = ""
    for typed in overrides:
        if len(typed) > LONGEST or not typed.isprintable():
            raise UserError("an override", f"is longer than {LONGEST} characters, or not printable")
        if typed.startswith("-"):
            raise UserError(typed, "options of the command line are not for the API")
        try:
            override: Override = OverridesParser.create().parse_override(typed)
        except (HydraException, RecursionError) as error:
            raise UserError(typed, f"cannot be read: {first_line(error)}", "key=value") from error
        key, value = override.key_or_group, override.value()
        if override.is_delete() or override.package is not None or override.is_sweep_override():
            raise UserError(typed, "must be one key and one value", f"{key}=VALUE")
        if key == "recipe":
            if recipe or not override.is_add() or not isinstance(value, str) or value not in recipes:
                raise UserError(typed, f"must be once one of {', '.join(sorted(recipes))}", "+recipe=NAME")
            recipe = value
        else:
            _check_key(typed, key, value)
            _check_value(typed, value, folder)
    if not recipe:
        raise UserError("overrides", "name no recipe", "+recipe=NAME")
    return recipe


def _check_key(typed: str, key: str, value: Any) -> None:
    section, _, inside = key.partition(".")
    if not KEY.fullmatch(key):
        raise UserError(typed, "has a key that is not for the API")
    if key in GROUPS and not (isinstance(value, str) and NAME.fullmatch(value)):
        raise UserError(typed, f"must be the name of an option of {key}", f"{key}=NAME")
    if key == "tracking" and value not in TRACKING:
        raise UserError(typed, f"must be one of {', '.join(TRACKING)}", "tracking=mlflow")
    if key in GROUPS or key in KEYS or (inside and section in (*GROUPS, *SECTIONS) and key not in REFUSED):
        return
    raise UserError(
        typed,
        f"the API sets keys of {', '.join((*GROUPS, *SECTIONS))}, and {', '.join(KEYS)}; others are the operator's",
    )


def _check_value(typed: str, value: Any, folder: Path) -> None:
    """Refuse what is no number, switch, word or path below the service's folder, or a list or mapping of these."""
    if value is None or isinstance(value, (bool, int, float)):
        return
    if isinstance(value, str):  # also a quoted one
        _check_text(typed, str(value), folder)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            if str(key).startswith("_") or not WORD.fullmatch(str(key)):
                raise UserError(typed, f"{key}: names of code are the operator's: put it into an option or a recipe")
            _check_value(typed, inside, folder)
    elif isinstance(value, Sequence):
        for inside in value:
            _check_value(typed, inside, folder)
    elif hasattr(value, "text"):  # Hydra's QuotedString
        _check_text(typed, value.text, folder)
    else:
        raise UserError(typed, "has a value that is not for the API")


def _check_text(typed: str, text: str, folder: Path) -> None:
    if text and not WORD.fullmatch(text):
        raise UserError(typed, "must be numbers, switches, words, or paths below the service's folder")
    base = folder.resolve()
    if not (base / text).resolve().is_relative_to(base):
        raise UserError(typed, "leads out of the service's folder")
