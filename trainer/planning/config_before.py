"""The config of a checkpoint beside that of the run that resumes from it: both without secrets, and with the keys of
today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.keys import sections
from trainer.config.redact import hide, values
from trainer.config.run_config import RunConfig


def public(config: RunConfig) -> dict[str, Any]:
    """A run's config without its secrets, as checkpoints have it."""
    plain = config.plain()
    return hide(plain, values(plain))  # type: ignore[no-any-return]


def completed(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """An older config with each key that it lacks and that has its default now: the trainer of then did what the
    default does.

    Args:
        now: the config with which it is compared.
        prefix: the dotted key under which both are.
    """
    full = dict(before)
    for name, value in now.items():
        path, inside = f"{prefix}{name}", before.get(name, {})
        if isinstance(value, Mapping) and isinstance(inside, Mapping):
            if part := completed(inside, value, f"{path}."):
                full[name] = part
        elif name not in before and _is_default(path, value):
            full[name] = value
    return full


def _is_default(path: str, value: Any) -> bool:
    """Whether a key has that default, in any of the options that have it."""
    return any(key.default == value for section in sections() for key in section.keys if key.path == path)
