"""The secret by which the hosts of a run recognise each other: the user's, from a file or an environment variable."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping

from trainer.config import redact, schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import private
from trainer.host.cache import cache_root, make
from trainer.host.engine_tasks import SECRET
from trainer.planning.launch_role import on_one_machine, peers
from trainer.wording import quoted

VARIABLE = SECRET
LEAST = 32
"""Characters."""
MOST = 4096
MAKE = "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > run.secret)"
KEPT = "run.secret"
"""In the user's cache."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def run_secret(launch: schema.LaunchConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Read the secret that the user gave the run; '' without one. From now on this process hides it in all output.

    Raises:
        UserError: it can be guessed, or its file is none or others can read it.
    """
    file = launch.secret_file
    secret = _of_file(file, f"launch.secret_file={file}") if file else environment.get(VARIABLE, "").strip()
    if secret and len(secret) < LEAST:
        where = f"launch.secret_file={file}" if file else VARIABLE
        raise UserError(
            where,
            f"is shorter than {LEAST} characters and could be guessed",
            MAKE if file else f"{VARIABLE}=$(openssl rand -hex 32) on all hosts",
        )
    redact.HERE.learn([secret] if secret else [])
    return secret


def secret_of_hosts(launch: schema.LaunchConfig) -> str:
    """The secret by which the hosts of a run recognise each other; '' without one, or with one host.

    It is the user's. If processes are started one by one on one machine, it may be a secret in the user's cache, which
    only this user can read.

    Raises:
        UserError: it can be guessed, or others can read it.
    """
    if launch.nnodes == 1:
        return ""
    if (secret := run_secret(launch)) or not peers(launch) or not on_one_machine(launch):
        return secret
    secret = _of_cache()
    redact.HERE.learn([secret])
    return secret


def _of_cache() -> str:
    """The secret in the user's cache; the first process that needs it makes it."""
    make(folder := cache_root())
    path = folder / KEPT
    if not path.exists():
        # containers that share the cache may have processes of one number
        own = folder / f"{KEPT}.{secrets.token_hex(8)}"
        private.write(own, secrets.token_hex(LEAST))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(own, path)
        own.unlink(missing_ok=True)
    return _of_file(str(path), f"the secret {path}")


def _of_file(name: str, what: str) -> str:
    try:
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(what, f"cannot be read: {error.strerror}", MAKE) from error
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(what, "is no file", MAKE)
        if found.st_uid != os.geteuid():
            raise UserError(what, "belongs to another user", MAKE)
        if found.st_mode & OTHERS:
            raise UserError(
                what,
                f"can be read or written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
                f"chmod 600 {quoted(name)}, after a new secret if others may have read this one",
            )
        if not (secret := os.read(number, MOST).decode(errors="replace").strip()):
            raise UserError(what, "is empty", MAKE)
        return secret
    finally:
        os.close(number)


def check_secret(config: RunConfig, roles: Mapping[str, int]) -> None:
    """Refuse servers that listen between hosts without a secret, so that strangers cannot pose as workers or servers.

    Raises:
        UserError: there is none, or it is no good one.
    """
    launch = config.launch
    if run_secret(launch) or launch.insecure or set(roles) == {"worker"}:
        return
    alone = launch.role is not None
    if alone and on_one_machine(launch):
        return
    raise UserError(
        f"launch.role={launch.role}" if alone else f"launch.nnodes={launch.nnodes}",
        "parameter servers and workers of several hosts know each other by a secret, and there is none. Make "
        "one, and copy it "
        f"to all hosts: {MAKE}",
        (
            f"launch.secret_file=run.secret on each host, or {VARIABLE}=... (or launch.insecure=true, where every "
            f"program of the network may change the training)"
        ),
    )


def has_secret(launch: schema.LaunchConfig) -> bool:
    """Whether the hosts of a run have a secret: the user's, or the one that processes on one machine share."""
    own = launch.secret_file or os.environ.get(VARIABLE)
    return bool(own) or (launch.role is not None and on_one_machine(launch))
