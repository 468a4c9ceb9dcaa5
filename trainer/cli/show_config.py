"""Hydra's own flags ``--cfg``, ``--info`` and ``--shell-completion``. Imports nothing that a run needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.explain import sentences
from trainer.planning import key_checks

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra


def show(app: Hydra, args: argparse.Namespace, config_name: str) -> None:
    """Let Hydra answer a command with one of its own flags: ``--cfg``, ``--info`` or ``--shell-completion``."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    with sentences(app, args.overrides, config_name):
        if args.cfg:
            if args.cfg == "job":  # report an invalid value instead of showing it
                shown = app.compose_config(config_name, args.overrides, run_mode=RunMode.RUN)
                plain: Any = OmegaConf.to_container(shown, resolve=False)
                key_checks.check_values(plain)
            app.show_cfg(config_name, args.overrides, args.cfg, args.package, args.resolve)
        elif args.info:
            compose.compose(app, args.overrides, config_name)  # report errors before anything is shown
            app.show_info(args.info, config_name, args.overrides)
        else:
            app.shell_completion(config_name, args.overrides)
