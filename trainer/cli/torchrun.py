"""``torchrun ... -m trainer +recipe=X``: rank 0 composes the config once; the other ranks wait for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from trainer.cli.arguments import typed_flags
from trainer.errors import UserError
from trainer.host.torchrun import starter_of
from trainer.planning.launcher import Starter


def join(parse: Callable[[], argparse.Namespace]) -> int:
    """Run this process as one of torchrun's ranks and return its exit code.

    Args:
        parse: returns the flags and overrides; called on rank 0 only.
    """
    from trainer.launch import torchrun  # imports torch

    return torchrun.join(lambda start: _run(parse(), start))


def _run(args: argparse.Namespace, start: Starter) -> None:
    from trainer.cli import commands, compose

    if args.multirun or args.cfg or args.info:
        raise UserError(starter_of(), "runs one job; sweeps and --cfg start without it", "python -m trainer ...")
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    topology = [f"launch.nproc={local}", *([f"launch.nnodes={size // local}"] if size > local else [])]
    ignored = ["launch.nnodes=1"] * (size == local) + ["launch.ips=null", "launch.workers=null"]
    with (
        compose.hydra_app(args.config_dir) as app,
        commands.chosen(args.overrides, args.config_name, typed_flags(args)) as asked,
    ):
        ours = [*topology, *ignored]
        commands.run_one(app, asked.overrides, asked.config_name, start, asked.flags, ours)
