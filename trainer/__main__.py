"""The command line: ``python -m trainer +recipe=NAME [key=value ...]``. Imports neither torch nor mlflow."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import NoReturn

from trainer.errors import Interrupted, RunFailed, UserError


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code (0 done, 1 failed, 2 wrong input, 130 interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return dispatch(argv)
    except (UserError, RunFailed, Interrupted) as error:
        if "debug=true" in argv:
            traceback.print_exc()
        word = {2: "error", 1: "failed", 130: "interrupted"}[error.exit_code]
        print(f"{word}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code


def dispatch(argv: list[str]) -> int:
    """Do what the flags ask for."""
    if any(a in ("-h", "--help") for a in argv):
        from trainer.help import show_help

        show_help()
        return 0
    from trainer.launch import torchrun

    if torchrun.present():
        return torchrun.join(argv)
    args = parse(argv)
    config_name = args.config_name or "config"
    from trainer import compose, service

    with compose.hydra_app(args.config_dir) as app:
        if args.cfg or args.info or args.shell_completion:
            service.show(app, args, config_name)
            return 0
        if args.hydra_help:
            app.hydra_help(config_name, _parser(), args)
            return 0
        if args.multirun:
            results = service.sweep(app, args.overrides, config_name)
            return 0 if all(r.status in ("done", "planned") for r in results) else 1
        service.run_one(app, args.overrides, config_name)
        return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides.

    Raises:
        UserError: an unknown flag, or one that does not go together with another.
    """
    args = _parser().parse_args(argv)
    if args.config_path:
        raise UserError("--config-path", "the vocabulary is trainer's own; yours is added to it", "--config-dir FOLDER")
    if args.resolve and not args.cfg:
        raise UserError("--resolve", "goes with --cfg", "--cfg job --resolve")
    modes = [f for f, on in (("--multirun", args.multirun), ("--cfg", args.cfg), ("--info", args.info)) if on]
    if len(modes) > 1:
        raise UserError(" ".join(modes), "do not go together; choose one")
    return args


def _parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    from trainer import __version__

    parser = get_args_parser()
    parser.prog = "python -m trainer"
    for action in parser._actions:
        if isinstance(action, argparse._VersionAction):
            action.version = f"trainer {__version__}"

    def refuse(message: str) -> NoReturn:
        raise UserError("the command line", message, "python -m trainer --help")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


if __name__ == "__main__":
    sys.exit(main())
