"""``python -m trainer.checkpoints list|show|verify|diff|export|fetch``. Only diff and export import torch."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from trainer.checkpoint import store
from trainer.checkpoint.remote import is_address
from trainer.config import redact
from trainer.errors import UserError, why
from trainer.host import interpreter
from trainer.host.folder_checks import check_working_folder
from trainer.terminal import streams
from trainer.visible import one_line
from trainer.wording import quoted

ABOUT = "Look at the checkpoints of a run, compare them, and export their models."
MODULE = "python -m trainer.checkpoints"
FORMATS = ("safetensors", "pt", "pt2", "onnx")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a UserError for wrong arguments, instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError("the command line", message, f"{MODULE} --help")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``python -m trainer.checkpoints``, with one subparser for each of its commands."""
    made = Parser(prog=MODULE, description=ABOUT, allow_abbrev=False)
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, text in (
        ("list", "the checkpoints of a run's folder: step, epoch, metric, size, age, and what is damaged"),
        ("show", "what a checkpoint holds: position, strategy, versions, files, config"),
        ("verify", "read every file and compare its checksum; exit code 1 where one is damaged"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        text = " (or their address)" if name == "list" else ""
        command.add_argument("path", metavar="PATH", help=f"the folder of a run or of a checkpoint{text}")
    text = "where two checkpoints differ: config, position, and each tensor of the models"
    command = commands.add_parser("diff", help=text, description=text, allow_abbrev=False)
    command.add_argument("path", metavar="A", help="the folder of a checkpoint, or of a run")
    command.add_argument("other", metavar="B", help="another")
    text = "the model as safetensors weights, a plain state_dict (.pt), a torch.export program (.pt2) or ONNX (.onnx)"
    command = commands.add_parser("export", help=text, description=text, allow_abbrev=False)
    command.add_argument("path", metavar="PATH", help="the folder of a checkpoint, or of a run")
    command.add_argument("out", metavar="OUT", type=Path, help="the file to write; its ending tells the format")
    command.add_argument("--format", choices=FORMATS, help="instead of the ending")
    command.add_argument("--ema", action="store_true", help="the averaged weights")
    text = (
        "bring a checkpoint from an address, as checkpoint.to leaves it, with the run's curves, into the folder "
        "of a run"
    )
    command = commands.add_parser("fetch", help=text, description=text, allow_abbrev=False)
    command.add_argument("path", metavar="ADDRESS", help="of a run, or of one of its checkpoints: s3://BUCKET/RUNS/RUN")
    command.add_argument("out", metavar="FOLDER", type=Path, help="of the run here; resume=auto then goes on from it")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a ``python -m trainer.checkpoints`` command line; returns the exit code.
    0 done, 1 damaged or failed, 2 wrong input."""
    with streams.guarded():
        redact.HERE.learn(redact.of_environment(os.environ))
        try:
            with streams.answering():
                asked = parser().parse_args(argv)
                check_working_folder()
                return dispatch(asked)
        except UserError as error:
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            print(f"failed: {error.filename or 'a file'}: {why(error)}", file=sys.stderr)
            return 1


def dispatch(arguments: argparse.Namespace) -> int:
    """Run the parsed ``python -m trainer.checkpoints`` command and return its exit code."""
    from trainer.checkpoint_tools import show

    if arguments.command == "fetch":
        return show.fetched(arguments.path, arguments.out)
    if arguments.command == "list" and is_address(arguments.path):
        return show.listed_at(arguments.path)
    path = _here(arguments.path)
    if arguments.command == "list":
        return show.listed(path)
    if arguments.command == "verify":
        return show.verified(path)
    if arguments.command == "show":
        return show.shown(_one(path))
    if arguments.command == "diff":
        from trainer.checkpoint_tools.compare import compared

        return compared(_one(path), _one(_here(arguments.other)))
    from trainer.checkpoint_tools.export import exported

    kind = arguments.format or arguments.out.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise UserError(
            str(arguments.out),
            f"its ending is none of {', '.join('.' + name for name in FORMATS)}",
            "--format safetensors",
        )
    exported(_one(path), arguments.out, kind, arguments.ema)
    return 0


def _here(path: str) -> Path:
    """Return a checkpoint's path as a local one; refuse a remote address.

    Raises:
        UserError: it is an address.
    """
    if is_address(path):
        raise UserError(path, "it is not on this machine", f"python -m trainer.checkpoints fetch {quoted(path)} FOLDER")
    return Path(path)


def _one(path: Path) -> Path:
    from trainer.terminal.screen import Screen

    return store.one_in(path, lambda line: Screen().print(line))


def command() -> None:
    """Entry point of ``python -m trainer.checkpoints``: run the command line and end this process."""
    with interpreter.command() as codes:
        codes.append(main())


if __name__ == "__main__":
    command()
