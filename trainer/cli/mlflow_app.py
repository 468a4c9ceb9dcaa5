"""The service inside MLflow's own server: ``mlflow server --app-name trainer`` (entry point ``mlflow.app``).

One process, one port: MLflow answers as ever, and the page and API of the queue lie below ``/trainer``. MLflow's
middleware checks Host before either sees a request, and its ``--allowed-hosts`` counts for both; our guard asks for a
token of ours besides.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from importlib import import_module
from typing import Any

PREFIX = "/trainer"
VARIABLE = "TRAINER_SERVE"
"""The variable with options of ``python -m trainer serve``, such as ``--runs FOLDER``."""
COOKIE = "trainer-mlflow"


def create_app() -> Any:
    """Make MLflow's application with the service below ``PREFIX``."""
    # By name: MLflow's server has imported itself before it asks for this application, and no command here does.
    fastapi_app, security, security_utils, handlers = (
        import_module(f"mlflow.server.{name}")
        for name in ("fastapi_app", "fastapi_security", "security_utils", "handlers")
    )
    from starlette.responses import RedirectResponse
    from starlette.routing import Mount, Route

    from trainer.cli import serve
    from trainer.service import api

    service = serve.made(serve.parsed(shlex.split(os.environ.get(VARIABLE, ""))), COOKIE)
    end = _End()
    guard = api.made(service, stopping=end.comes)
    allowed = security.get_allowed_hosts()
    guard.is_own = lambda host: security_utils.is_allowed_host_header(allowed, host)  # type: ignore[method-assign]
    app = fastapi_app.create_fastapi_app()
    prefix = f"{os.environ.get(handlers.STATIC_PREFIX_ENV_VAR, '').rstrip('/')}{PREFIX}"
    to_page = Route(prefix, lambda request: RedirectResponse(f"{prefix}/"))
    app.router.routes[:0] = [to_page, Mount(prefix, guard)]  # MLflow's own routes end with one for everything
    if not service.tokens.names():
        print(f"{prefix}/ has no token yet: python -m trainer serve --new-token owner", file=sys.stderr, flush=True)
    return app


class _End:
    """Whether the server was asked to end. It waits for all answers, so those that stream have to end by themselves."""

    def __init__(self) -> None:
        self._asked = self._listens = False

    def comes(self) -> bool:
        """Whether a signal to end has come since the first stream."""
        if not self._listens:
            self._listens = True
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ValueError):  # another thread than the main one
                    self._listen(number)
        return self._asked

    def _listen(self, number: int) -> None:
        of_server = signal.getsignal(number)

        def asked(number: int, frame: Any) -> None:
            self._asked = True
            if callable(of_server):
                of_server(number, frame)

        signal.signal(number, asked)
