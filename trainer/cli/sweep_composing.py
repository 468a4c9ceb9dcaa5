"""Composes the configs of a sweep with Hydra: without overrides that only some points accept, each file once.

Hydra merges the files of the chosen options (``optimizer=adam``), and then sets the typed values
(``optimizer.lr=0.1``). Jobs that differ in values alone share the first step, which takes most of the time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
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
    _share_files(app)
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


def _share_files(app: Hydra) -> None:
    """Let Hydra merge the files of each choice of options once for all jobs that this application composes."""
    from hydra._internal import config_loader_impl
    from hydra._internal.defaults_list import Overrides

    loader: Any = app.config_loader
    hydra: Any = config_loader_impl
    whole, merge, list_files = loader.load_configuration, loader._compose_config_from_defaults_list, None
    lists: dict[Any, Any] = {}
    merged: dict[int, DictConfig] = {}

    def listed(repo: Any, config_name: str | None, overrides_list: list[Any], **others: Any) -> Any:
        values = Overrides(repo, overrides_list).config_overrides
        set_later = {id(one) for one in values if not one.is_hydra_override()}  # hydra.searchpath adds files
        options = tuple(one.input_line for one in overrides_list if id(one) not in set_later)
        key = (config_name, options, *others.items())
        if key not in lists:
            assert list_files is not None
            lists[key] = list_files(repo, config_name, overrides_list, **others)
        return replace(lists[key], config_overrides=values)

    def merged_once(defaults: list[Any], repo: Any) -> DictConfig:
        if id(defaults) not in merged:  # they live as long as their list
            merged[id(defaults)] = merge(defaults, repo)
        return copy.deepcopy(merged[id(defaults)])

    def load(*args: Any, **others: Any) -> Any:
        nonlocal list_files
        list_files, hydra.create_defaults_list = hydra.create_defaults_list, listed
        try:
            return whole(*args, **others)
        finally:
            hydra.create_defaults_list = list_files

    loader._compose_config_from_defaults_list = merged_once
    loader.load_configuration = load
