"""The tokens of the service: who may use it, in a file (0600) that holds no token, only their SHA-256.

A token is 256 random bits, so a hash without salt and rounds is enough: nobody finds it by trying words. The page keeps
no token either. A login makes two values of a token's name and hash, both keyed with a secret of the file:

    cookie      NAME.EXPIRES.HMAC: HttpOnly, so no script reads it; the browser sends it to every port of the host
    csrf value  HMAC of the cookie: kept by the page's script, which no other port or site can read

An answer needs both. So neither another site, nor another user's server on this host that gets the cookie, can use it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from trainer.errors import UserError, why

FILE = "tokens.json"
OWNER = "owner"
"""The name of the first token: it may act on every run, and has no quota."""
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
PREFIX = "trn_"
LOGIN_S = 30 * 24 * 3600
"""So long a login lasts."""


@dataclass(frozen=True)
class Caller:
    """Who calls.

    Attributes:
        name: of the token.
    """

    name: str

    @property
    def owner(self) -> bool:
        """Whether it may act on every run."""
        return self.name == OWNER


class Tokens:
    """The tokens in a folder. The file is read for each question, so that a revoked token is refused at once.

    Args:
        folder: that of the queue.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def names(self) -> list[str]:
        """Return the names of all tokens."""
        return list(self._read()[1])

    def make(self, name: str) -> str:
        """Make a token, which is kept nowhere.

        Raises:
            UserError: there is one of this name, or it is no name.
        """
        if not NAME.fullmatch(name):
            raise UserError(f"--new-token {name}", "must be 1 to 32 of a-z, 0-9 and -, with no - at an end")
        token = PREFIX + secrets.token_urlsafe(32)
        with self._changed() as hashes:
            if name in hashes:
                raise UserError(
                    f"--new-token {name}", "there is such a token", f"python -m trainer serve --revoke {name}"
                )
            hashes[name] = _hash(token)
        return token

    def revoke(self, name: str) -> None:
        """Remove a token: what carries it, or was logged in by it, is refused from now on.

        Raises:
            UserError: there is none of this name.
        """
        with self._changed() as hashes:
            if hashes.pop(name, None) is None:
                raise UserError(f"--revoke {name}", f"there is no such token; there are {', '.join(hashes) or 'none'}")

    def caller(self, token: str) -> Caller | None:
        """Return who has a token; None: nobody."""
        digest, found = _hash(token), None
        for name, known in self._read()[1].items():  # all of them, so that the time says nothing
            if hmac.compare_digest(digest, known):
                found = Caller(name)
        return found

    def login(self, caller: Caller) -> tuple[str, str]:
        """Return the cookie and the csrf value of a login."""
        key, hashes = self._read()
        text = f"{caller.name}.{int(time.time()) + LOGIN_S}"
        cookie = f"{text}.{_mac(key, 'cookie', text, hashes.get(caller.name, ''))}"
        return cookie, _mac(key, "csrf", cookie)

    def logged_in(self, cookie: str, csrf: str) -> Caller | None:
        """Return who has logged in with a cookie and its csrf value; None: nobody, or too long ago."""
        key, hashes = self._read()
        text, _, mac = cookie.rpartition(".")
        name, _, expires = text.partition(".")
        known = hashes.get(name, "")
        right = hmac.compare_digest(mac.encode(), _mac(key, "cookie", text, known).encode())
        right &= hmac.compare_digest(csrf.encode(), _mac(key, "csrf", cookie).encode())
        if not right or not known or not expires.isdecimal() or int(expires) < time.time():
            return None
        return Caller(name)

    def _read(self) -> tuple[bytes, dict[str, str]]:
        try:
            kept = json.loads(self.path.read_text())
            return bytes.fromhex(kept.get("key")), dict(kept.get("hashes"))
        except FileNotFoundError:
            return secrets.token_bytes(32), {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(str(self.path), f"cannot be read: {why(error)}", f"rm {self.path}") from error

    @contextmanager
    def _changed(self) -> Iterator[dict[str, str]]:
        """Context manager: the hashes by name, written at its end."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(f"{self.path}.lock", mode=0o600):
            key, hashes = self._read()
            yield hashes
            new = self.path.with_suffix(".new")
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"key": key.hex(), "hashes": hashes}, file)
            new.replace(self.path)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _mac(key: bytes, *parts: Any) -> str:
    return hmac.new(key, "\n".join(parts).encode(errors="surrogateescape"), "sha256").hexdigest()
