"""What every request passes before any route sees it, and the headers that every answer gets.

1. Host names this service: a name of loopback, or one of ``--allow-host``. A page of another site whose name has been
   rebound to 127.0.0.1 still sends that name.
2. Origin, where a browser sends one, is this same host.
3. The body is at most ``MOST_BYTES``.
4. For all paths but those of the page and the login: a token, or a login's cookie together with its csrf value. A
   cookie alone opens nothing, so that a form or a link of another site does nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from fastapi import HTTPException

from trainer.errors import UserError
from trainer.service.tokens import Caller, Tokens

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 64 << 10
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")
CSRF = "x-csrf-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Refused(HTTPException):
    """The error for a request that no route sees: an HTTP status, and a sentence."""


def below(scope: Scope) -> str:
    """The path of a request below the place where this application is mounted, as ASGI has it in ``root_path``."""
    return str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))


class Guard:
    """The middleware.

    Args:
        app: what answers. tokens: those that open it. cookie: its name. without_token: paths of the page and the
        login. hosts: further names of this service.
    """

    def __init__(
        self, app: App, tokens: Tokens, cookie: str, without_token: Collection[str], hosts: Collection[str] = ()
    ) -> None:
        self.app, self.tokens, self.cookie, self.open = app, tokens, cookie, frozenset(without_token)
        self.hosts = LOOPBACK | {host.lower() for host in hosts}

    def is_own(self, host: str) -> bool:
        """Whether ``NAME`` or ``NAME:PORT`` is a name of this service."""
        found = HOST.fullmatch(host)
        return found is not None and found[1].lower() in self.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope.get("type") == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope.get("type") != "http":  # no route is a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        began = False

        async def answer(message: Message) -> None:
            nonlocal began
            if message.get("type") == "http.response.start":
                began = True
                kept = [pair for pair in message.get("headers", []) if pair[0].decode().lower() not in HEADERS]
                message = {**message, "headers": kept + [(k.encode(), v.encode()) for k, v in HEADERS.items()]}
            await send(message)

        try:
            caller = self.check(scope)
            scope.setdefault("state", {}).update(caller=caller)
            await self.app(scope, _limited(receive, _length(scope)), answer)
        except Refused as refused:
            if not began:
                await _refuse(answer, refused)

    def check(self, scope: Scope) -> Caller | None:
        """Return who calls; None: nobody, for a path that is open.

        Raises:
            Refused: the request does not pass.
        """
        headers = _headers(scope)
        host = HOST.fullmatch(headers.get("host", ""))
        if host is None or not self.is_own(host[0]):
            raise Refused(403, "Host is no name of this service: start it with --allow-host NAME if it is one")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host[0]}".lower(), f"https://{host[0]}".lower()):
            raise Refused(403, "Origin is another site")
        if _length(scope) > MOST_BYTES:
            raise Refused(413, f"the body is larger than {MOST_BYTES} bytes")
        if below(scope) in self.open:
            return None
        try:
            return self._caller(headers)
        except UserError as error:
            raise Refused(503, "the tokens cannot be read: the service's owner knows more") from error

    def _caller(self, headers: dict[str, str]) -> Caller:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if (caller := self.tokens.caller(token.strip())) is not None:
                return caller
            raise Refused(401, "there is no such token, or it is revoked")
        cookie = _cookie(headers.get("cookie", ""), self.cookie)
        if not cookie:
            raise Refused(401, "send a token: Authorization: Bearer TOKEN")
        if (caller := self.tokens.logged_in(cookie, headers.get(CSRF, ""))) is None:
            raise Refused(401, f"the login has ended, or {CSRF} is not that of the login")
        return caller


def _headers(scope: Scope) -> dict[str, str]:
    """The headers of a request by name in small letters.

    Raises:
        Refused: one that decides over access is sent twice.
    """
    found: dict[str, str] = {}
    for key, value in scope.get("headers", []):
        name = key.decode("latin-1").lower()
        if name in found and name in ("host", "origin", "authorization", CSRF):
            raise Refused(400, f"{name} is sent twice")
        found[name] = f"{found[name]}; {value.decode('latin-1')}" if name in found else value.decode("latin-1")
    return found


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _length(scope: Scope) -> int:
    length = dict(scope.get("headers", [])).get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18:
        raise Refused(400, "content-length is no number")
    return int(length)


def _limited(receive: Receive, length: int) -> Receive:
    """Count the bytes of a body as they come: a chunked one does not say its length."""
    size = 0

    async def one() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MOST_BYTES:
            raise Refused(413, f"the body is larger than {MOST_BYTES} bytes")
        return message

    return one


async def _refuse(send: Send, refused: Refused) -> None:
    body = json.dumps({"error": refused.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status_code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
