"""``python -m trainer serve``: the page and the API of this machine's queue, on loopback, behind a token."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.verb_parser import VerbParser, within
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.service.api import Service

SERVE = "serve"
USAGE = (
    "python -m trainer serve [--port N] [--host ADDRESS] [--allow-host NAME] [--runs FOLDER] [--config-dir FOLDER]"
    " [--quota N] | --new-token NAME | --revoke NAME"
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PACKAGES = ("fastapi", "uvicorn")


def answer(words: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM, or make or revoke a token; returns the exit code.

    Raises:
        UserError: an option cannot be, or the port is not free.
    """
    from trainer.service import queue
    from trainer.service.tokens import Tokens

    asked = parsed(words)
    tokens = Tokens(queue.home())
    if asked.revoke:
        tokens.revoke(asked.revoke)
        print(f"revoked {asked.revoke}")
        return 0
    if asked.new_token:
        _show(asked.new_token, tokens.make(asked.new_token))
        return 0
    return _serve(asked, tokens)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words after ``serve``.

    Raises:
        UserError: it takes other words.
    """
    parser = VerbParser(prog=SERVE, usage=USAGE, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address that is listened at")
    parser.add_argument("--port", type=within(int, 0, 65535), default=8080, help="0: a free one")
    parser.add_argument("--allow-host", action="append", default=[], help="a further name of this service")
    parser.add_argument("--runs", default="runs", help="folder of the runs that are submitted here")
    parser.add_argument("--config-dir", help="your own recipes and options")
    parser.add_argument("--quota", type=within(int, 0), default=20, help="runs of a token that wait or live")
    parser.add_argument("--new-token", help="make a token of this name, and print it")
    parser.add_argument("--revoke", help="refuse the token of this name from now on")
    return parser.parse_args(words)


def _show(name: str, token: str) -> None:
    """Print a token, past what hides secrets: it is shown this once."""
    os.write(1, f"token   {token}   of {name}; it is kept nowhere, and shown only now\n".encode())


def _serve(asked: argparse.Namespace, tokens: object) -> int:
    import importlib.util
    import socket

    if lacks := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError("serve", f"needs {' and '.join(lacks)}", "pip install 'trainer[serve]'")
    import uvicorn

    from trainer.service import api

    if asked.host not in LOOPBACK and not asked.allow_host:
        raise UserError(
            f"--host {asked.host}",
            "is not loopback: tokens would go over the network in the clear, unless a proxy adds TLS",
            f"--host {asked.host} --allow-host NAME, or an SSH tunnel to --host 127.0.0.1",
        )
    try:
        family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET
        listener = socket.create_server((asked.host, asked.port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {asked.host} --port {asked.port}", f"cannot be used: {error}", "--port 0") from error
    port = listener.getsockname()[1]
    service = made(asked, f"trainer-{port}")
    server = uvicorn.Server(
        uvicorn.Config(
            api.made(service, asked.allow_host, lambda: server.should_exit),
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=256,
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=32 << 10,
            proxy_headers=False,
        )
    )
    shown = f"[{asked.host}]" if ":" in asked.host else asked.host
    print(f"page    http://{shown}:{port}/")
    sys.stdout.flush()
    if not service.tokens.names():
        _show("owner", service.tokens.make("owner"))
    else:
        print(f"tokens  {', '.join(service.tokens.names())}   another one: python -m trainer serve --new-token NAME")
    print(f"runs    {service.submitter.folder}\nend     Ctrl-C; runs go on", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn ends by them, and raises them again at its end
        signal.signal(number, lambda *about: None)
    with listener:
        server.run(sockets=[listener])
    return 0


def made(asked: argparse.Namespace, cookie: str) -> Service:
    """What the routes share, from the command line.

    Args:
        cookie: name of the login's.
    """
    from trainer.cli import help, queue_verbs
    from trainer.service import allowed, api, queue
    from trainer.service.messages import Choices
    from trainer.service.slots import of_this_host
    from trainer.service.submitting import Submitter
    from trainer.service.tokens import Tokens

    folder = Path(asked.runs).absolute()
    config_dir = None if asked.config_dir is None else str(Path(asked.config_dir).absolute())
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {asked.config_dir}", "there is no such folder", "--config-dir FOLDER")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    choices = Choices(
        recipes=dict(help.options("recipe", config_dir)),
        groups={group: [name for name, _ in help.options(group, config_dir)] for group in allowed.GROUPS},
    )
    home = queue.home()
    return api.Service(
        home=home,
        tokens=Tokens(home),
        slots=of_this_host(),
        choices=choices,
        submitter=Submitter(
            home,
            folder,
            choices.recipes.keys(),
            () if config_dir is None else ("--config-dir", config_dir),
            _environment(),
            asked.quota,
        ),
        act=queue_verbs.done,
        cookie=cookie,
    )


def _environment() -> dict[str, str]:
    """The environment of runs: this one's; data and code of this working folder are found as from here."""
    import os.path

    here = os.getcwd()
    found = {"TRAINER_DATA": os.path.abspath("data"), **os.environ}
    if {"", here} & set(sys.path) and "PYTHONSAFEPATH" not in os.environ:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    return found
