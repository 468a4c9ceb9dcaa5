"""Composes the config of a sweep with Hydra, and of its points without what they cannot take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.compose import compose, write_config
from trainer.config.keys import key_of
from trainer.errors import UserError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from hydra.types import RunMode
    from omegaconf import DictConfig


@contextlib.contextmanager
def ours_to_write() -> Iterator[None]:
    """Context manager: files that Hydra saves when it composes a sweep (multirun.yaml, .hydra/) are written by :func:`write_config`."""
    from hydra.core import utils
    from omegaconf import OmegaConf

    saved, written = OmegaConf.save, utils._save_config

    def save(config: Any, f: Any, resolve: bool = False) -> None:
        write_config(Path(f), config, resolve)

    def write(config: Any, filename: str, output_dir: Path) -> None:
        write_config(Path(output_dir) / filename, config)

    OmegaConf.save, utils._save_config = staticmethod(save), write  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        OmegaConf.save, utils._save_config = staticmethod(saved), written  # type: ignore[assignment, method-assign]


def compose_sweep(app: Hydra, overrides: list[str], config_name: str) -> tuple[DictConfig, list[str]]:
    """Compose the config of a sweep; also returns the overrides that only single points can take.

    Raises:
        UserError: as :func:`compose`.
    """
    later: list[str] = []
    while True:
        try:
            with leaving_out(app, later, {}):
                return compose(app, overrides, config_name, multirun=True), later
        except UserError as error:
            strange = [o for o in overrides if o not in later and key_of(o) in error.unusable]
            if not strange:
                raise
            later += strange


@contextlib.contextmanager
def leaving_out(app: Hydra, later: list[str], strange: Mapping[tuple[str, ...], list[str]]) -> Iterator[None]:
    """Context manager: Hydra composes a sweep without the overrides ``later``, and its points without ``strange`` ones."""
    loader: Any = app.config_loader
    whole, point = loader.load_configuration, loader.load_sweep_config

    def load(*, overrides: list[str], run_mode: RunMode, **others: Any) -> DictConfig:
        from hydra.types import RunMode
        from omegaconf import OmegaConf, open_dict, read_write

        others["run_mode"] = run_mode
        if run_mode == RunMode.RUN:  # a point
            return whole(overrides=overrides, **others)  # type: ignore[no-any-return]
        config: DictConfig = whole(overrides=[o for o in overrides if o not in later], **others)
        with read_write(config), open_dict(config):
            task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            known = [*task, *later]
            config.hydra.overrides.task = [o for o in overrides if o in known]
        return config

    def load_point(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        left_out = strange.get(tuple(sweep_overrides), ())
        config: DictConfig = point(master_config, [o for o in sweep_overrides if o not in left_out])
        return config

    loader.load_configuration, loader.load_sweep_config = load, load_point
    try:
        yield
    finally:
        loader.load_configuration, loader.load_sweep_config = whole, point
