"""Parses the command line: flags, and overrides as Hydra takes them."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from trainer.config.keys import key_of
from trainer.errors import UserError
from trainer.host.text_checks import check_text
from trainer.wording import quoted


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line of ``python -m trainer`` with argparse: Hydra's flags, and the overrides.

    Raises:
        UserError: a flag is unknown, one of fleetrun's, or contradicts another; or a word is not UTF-8.
    """
    _check_words(argv)
    for place, word in enumerate(argv[:-1]):  # what --info shows may be left out, and what follows is an override then
        if word in ("--info", "-i") and re.match(r"[+~]|[\w./@-]+=", argv[place + 1]):
            argv = [*argv[:place], "--info=all", *argv[place + 1 :]]
    if any(word.startswith("--") for word in argv):
        from trainer.cli import fleet_flags

        fleet_flags.refuse(argv)
    args = argument_parser().parse_intermixed_args(argv)  # overrides may stand before and after flags
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

    args.overrides = hydra_overrides(args.overrides)
    return args


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        check_text(word, word, "another name or value, in UTF-8")


def _check_package(package: str) -> None:
    """Refuse a ``--package`` whose first part is not in the config; Hydra would end the process."""
    from trainer.config import keys, schema

    known = ["_global_", "hydra", *(k.path for k in keys.keys(schema.Config))]
    if (first := package.partition(".")[0]) not in known:
        near = keys.nearest(first, known)
        raise UserError(f"--package {package}", "the config has no such part", f"--package {near}" if near else "")


def _check_completion(overrides: list[str]) -> None:
    """Refuse ``--shell-completion`` with other words than Hydra knows; a query comes from the shell itself."""
    verb, _, shell = (overrides or [""])[0].partition("=")
    if verb not in ("install", "uninstall", "query") or shell not in ("bash", "zsh", "fish"):
        raise UserError(
            "--shell-completion", "takes install or uninstall, and the shell", "--shell-completion install=bash"
        )
    if verb == "query" and "COMP_LINE" not in os.environ:
        raise UserError(
            f"--shell-completion {overrides[0]}",
            "the shell asks this, with COMP_LINE in the environment",
            f"--shell-completion install={shell}",
        )


def _as_key(flag: str, value: str) -> str:
    """The override for an unknown flag: ``plan=true`` for ``--plan``, ``optimizer.lr=0.1`` for ``--lr 0.1``."""
    from trainer.config import keys

    name = flag.lstrip("-").replace("-", "_")
    if name == "recipe":
        return quoted(f"+recipe={value or 'NAME'}")
    known = [key for section in keys.sections() for key in section.keys]
    found = next((k for k in known if k.path == name), None) or next(
        (k for k in known if k.path.rpartition(".")[2] == name), None
    )
    if found is None or not flag.startswith("--"):
        return ""
    return quoted(f"{found.path}={value or ('true' if found.kind is bool else 'VALUE')}")


def argument_parser() -> argparse.ArgumentParser:
    """Make the argparse parser of the command line: Hydra's, whose errors become a UserError."""
    from hydra._internal.utils import get_args_parser

    from trainer.version import __version__

    parser = get_args_parser()
    parser.prog = "python -m trainer"
    for action in parser._actions:
        if isinstance(action, argparse._VersionAction):
            action.version = f"trainer {__version__}"

    typed_flags = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]

    def refuse(message: str) -> NoReturn:
        wrong = message.removeprefix("unrecognized arguments: ")
        if wrong == message:
            raise UserError("the command line", message, "python -m trainer --help")
        flag, _, value = wrong.split()[0].partition("=")
        if meant := _as_key(flag, value or (wrong.split()[1:] or [""])[0]):
            raise UserError(wrong, "there is no such flag; what a run does is said in keys", meant)
        near = difflib.get_close_matches(flag, typed_flags, 1) if flag.startswith("--") else []
        raise UserError(wrong, "there is no such flag", near[0] if near else "python -m trainer --help")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


ADVISE, AUTO = "strategy=advise", "strategy=auto"
TEXT_WITH_COMMAS = (
    "advise.workers",
    "launch.ips",
    "launch.hosts",
    "launch.server_hosts",
    "launch.server_ports",
    "launch.server_endpoints",
    "launch.worker_endpoints",
)

IN_FULL = {"resume": "resume.path", "sweep": "sweep.search", "register": "tracking.registered_model"}
"""Groups that are typed for one of their keys."""


def typed_flags(args: argparse.Namespace) -> list[str]:
    """Return ``--config-dir`` and ``--config-name`` as typed, for the command that repeats the run."""
    flags = (("--config-dir", args.config_dir), ("--config-name", args.config_name))
    return [word for flag, value in flags if value for word in (flag, str(value))]


def hydra_overrides(overrides: list[str]) -> list[str]:
    """Rewrite typed overrides for Hydra: the keys of ``IN_FULL`` are written out, and texts with commas are quoted.

    Raises:
        UserError: an override is not UTF-8.
    """
    _check_words(overrides)
    overrides = [_in_full(o) for o in overrides]
    return [f"{o.partition('=')[0]}='{o.partition('=')[2]}'" if _has_commas(o) else o for o in overrides]


def _in_full(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{IN_FULL[key]}={value}" if key in IN_FULL else override


def _has_commas(override: str) -> bool:
    name, _, value = override.partition("=")
    return name.lstrip("+") in TEXT_WITH_COMMAS and "," in value and value[0] not in "'\""


def typed_keys(overrides: Sequence[str]) -> list[str]:
    """The config keys that these typed overrides set."""
    return [key_of(o) for o in overrides]


def asked_advice(overrides: Sequence[str]) -> str:
    """``strategy=advise`` or ``strategy=auto``, where it is typed; else empty: by default ``auto`` measures nothing."""
    typed = [o for o in overrides if key_of(o) == "strategy"]
    return typed[-1] if typed and typed[-1] in (ADVISE, AUTO) else ""
