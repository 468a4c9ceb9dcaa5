"""Composes the config of a sweep with Hydra, without overrides that only some points accept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.cli.compose import compose
from trainer.config.keys import key_of
from trainer.errors import UserError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig


def compose_sweep(app: Hydra, overrides: list[str], config_name: str) -> DictConfig:
    """Compose the config of a sweep, without overrides that only some points accept.

    Raises:
        UserError: see :func:`trainer.cli.compose.compose`.
    """
    later: list[str] = []
    while True:
        try:
            with _without(app, later):
                return compose(app, overrides, config_name, multirun=True)
        except UserError as error:
            strange = [o for o in overrides if o not in later and key_of(o) in error.unusable]
            if not strange:
                raise
            later += strange


@contextlib.contextmanager
def _without(app: Hydra, later: list[str]) -> Iterator[None]:
    """Context manager: Hydra composes a sweep without the overrides ``later``, which only the points get."""
    loader: Any = app.config_loader
    whole = loader.load_configuration

    def load(*, overrides: list[str], **others: Any) -> DictConfig:
        from omegaconf import OmegaConf, open_dict, read_write

        config: DictConfig = whole(overrides=[o for o in overrides if o not in later], **others)
        with read_write(config), open_dict(config):
            task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            known = [*task, *later]
            config.hydra.overrides.task = [o for o in overrides if o in known]
        return config

    loader.load_configuration = load
    try:
        yield
    finally:
        loader.load_configuration = whole
