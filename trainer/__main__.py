"""The command line ``python -m trainer +recipe=NAME [key=value ...]``. This module imports neither torch nor mlflow."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
import traceback
from typing import NoReturn

from trainer.cli import arguments, fleet_flags
from trainer.config import redact
from trainer.errors import BY_CTRL_C, Interrupted, RunFailed, UserError
from trainer.host import interpreter
from trainer.terminal import streams
from trainer.visible import one_line


def main(argv: list[str] | None = None) -> int:
    """Run a ``python -m trainer`` command line; returns the exit code.
    0 done, 1 failed, 2 wrong input, 75 pre-empted, 130 interrupted."""
    with streams.guarded():
        redact.HERE.learn(redact.of_environment(os.environ), redact.of_command_line(argv or sys.argv[1:]))
        if argv is None:
            arguments.cover()
            _import_alike()
        return _answer(sys.argv[1:] if argv is None else argv)


def _import_alike() -> None:
    """Processes that this one starts look for modules in the working folder only if this one does.

    The installed command does not; Python's ``-m`` and ``-c``, by which other processes start, would, and anybody may have
    put a ``json.py`` into the folder.
    """
    with contextlib.suppress(OSError):  # the folder is gone
        if not {"", os.getcwd()} & set(sys.path):
            os.environ["PYTHONSAFEPATH"] = "1"


def _answer(argv: list[str]) -> int:
    try:
        return dispatch(argv)
    except (UserError, RunFailed, Interrupted) as error:
        if {"debug=true", "verbosity=debug"}.intersection(argv):
            traceback.print_exc()
        word = {2: "error", 1: "failed", 75: "preempted", 130: "interrupted"}[error.exit_code]
        print(f"{word}: {one_line(str(error)) if error.exit_code == UserError.exit_code else error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # what to type next, after all else
            print(note, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"interrupted: {error or BY_CTRL_C}", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:  # the reader of our output has gone, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a disk that is full, a folder that is gone
        if "debug=true" in argv:
            traceback.print_exc()
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except Exception:  # a mistake of ours; here and not by the interpreter, which would show secrets
        traceback.print_exc()
        return 1


def command() -> NoReturn:
    """Entry point of ``python -m trainer`` and of the script ``trainer``: run the command line and end the process."""
    interpreter.begin()
    try:
        code = main()
    except SystemExit as end:  # argparse, after --version
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    interpreter.leave(code)


def dispatch(argv: list[str]) -> int:
    """Do what the parsed flags of ``python -m trainer`` ask for: print help, config or plan, run a sweep or a job."""
    if any(a in ("-h", "--help") for a in argv):
        from trainer.cli.help import show_help

        show_help(argv)
        return 0
    from trainer.cli import torchrun

    if torchrun.present():
        return torchrun.join(lambda: parse(argv))
    args = parse(argv)
    config_name = args.config_name or "config"
    from trainer.cli import compose

    with compose.hydra_app(args.config_dir) as app:
        if args.cfg or args.info or args.shell_completion:
            from trainer.cli.hydra_flags import show

            show(app, args, config_name)
            return 0
        if args.hydra_help:
            with compose.sentences(app, args.overrides, config_name):
                app.hydra_help(config_name, _parser(), args)
            return 0
        from trainer.cli import commands

        if args.multirun:
            from trainer.cli.sweep import sweep

            results = sweep(app, args.overrides, config_name, compose.flags(args))
            return max(map(commands.exit_code, results), default=0)
        return commands.exit_code(commands.run_one(app, args.overrides, config_name, flags=compose.flags(args)))


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line of ``python -m trainer`` with argparse: Hydra's flags, and the overrides.

    Raises:
        UserError: an unknown flag, one of fleetrun's, or one that does not go together with another.
    """
    for place, word in enumerate(argv[:-1]):  # what --info shows may be left out, and what follows is an override then
        if word in ("--info", "-i") and re.match(r"[+~]|[\w./@-]+=", argv[place + 1]):
            argv = [*argv[:place], "--info=all", *argv[place + 1 :]]
    fleet_flags.refuse(argv)
    args = _parser().parse_intermixed_args(argv)  # overrides may stand before and after flags
    if args.config_path:
        raise UserError("--config-path", "the vocabulary is trainer's own; yours is added to it", "--config-dir FOLDER")
    if args.experimental_rerun:
        raise UserError("--experimental-rerun", "is not supported; a run's last line says how to repeat it")
    if args.resolve and not args.cfg:
        raise UserError("--resolve", "goes with --cfg", "--cfg job --resolve")
    if args.package:
        _check_package(args.package)
    if args.shell_completion:
        _check_completion(args.overrides)
    modes = [f for f, on in (("--multirun", args.multirun), ("--cfg", args.cfg), ("--info", args.info)) if on]
    if len(modes) > 1:
        raise UserError(" ".join(modes), "do not go together; choose one", modes[-1])
    from trainer.cli.compose import quoted

    args.overrides = quoted(args.overrides)
    return args


def _check_package(package: str) -> None:
    """``--package`` names a part of the config, by its first part at least; Hydra ends the process otherwise."""
    from trainer.config import keys, schema

    known = ["_global_", "hydra", *(k.path for k in keys.keys(schema.Config))]
    if (first := package.partition(".")[0]) not in known:
        near = keys.nearest(first, known)
        raise UserError(f"--package {package}", "the config has no such part", f"--package {near}" if near else "")


def _check_completion(overrides: list[str]) -> None:
    """``--shell-completion`` takes one of three words and a shell; a query comes from the shell itself."""
    verb, _, shell = (overrides or [""])[0].partition("=")
    if verb not in ("install", "uninstall", "query") or shell not in ("bash", "zsh", "fish"):
        raise UserError("--shell-completion", "takes install or uninstall, and the shell", "--shell-completion install=bash")  # fmt: skip
    if verb == "query" and "COMP_LINE" not in os.environ:
        raise UserError(f"--shell-completion {overrides[0]}", "the shell asks this, with COMP_LINE in the environment", f"--shell-completion install={shell}")  # fmt: skip


def _as_key(flag: str, value: str) -> str:
    """The override that somebody means who typed a flag: ``--plan`` is ``plan=true``, ``--lr 0.1`` is ``optimizer.lr=0.1``."""
    from trainer.config import keys

    name = flag.lstrip("-").replace("-", "_")
    if name == "recipe":
        return f"+recipe={value or 'NAME'}"
    known = [key for section in keys.sections() for key in section.keys]
    found = next((k for k in known if k.path == name), None) or next((k for k in known if k.path.rpartition(".")[2] == name), None)  # fmt: skip
    if found is None or not flag.startswith("--"):
        return ""
    return f"{found.path}={value or ('true' if found.kind is bool else 'VALUE')}"


def _parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    from trainer import __version__

    parser = get_args_parser()
    parser.prog = "python -m trainer"
    for action in parser._actions:
        if isinstance(action, argparse._VersionAction):
            action.version = f"trainer {__version__}"

    flags = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]

    def refuse(message: str) -> NoReturn:
        wrong = message.removeprefix("unrecognized arguments: ")
        if wrong == message:
            raise UserError("the command line", message, "python -m trainer --help")
        flag, _, value = wrong.split()[0].partition("=")
        if meant := _as_key(flag, value or (wrong.split()[1:] or [""])[0]):
            raise UserError(wrong, "there is no such flag; what a run does is said in keys", meant)
        near = difflib.get_close_matches(flag, flags, 1) if flag.startswith("--") else []
        raise UserError(wrong, "there is no such flag", near[0] if near else "python -m trainer --help")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


if __name__ == "__main__":
    command()
