"""``trainer.Client``: submits runs to a service (``python -m trainer serve``), and waits for their results."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trainer.errors import RunFailed, UserError
from trainer.job.result import Result
from trainer.service.queue import DONE, OVER

ASK_S, POLL_S = 60.0, 1.0
"""Longest wait for an answer, and time between two questions about a run, in seconds."""


class Client:
    """A service and a token of it.

    Args:
        url: as ``python -m trainer serve`` prints it, such as ``http://127.0.0.1:8080``.
        token: shown when it was made.
    """

    def __init__(self, url: str, token: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"Client({url!r}, ...)", "is no address of a service", "http://127.0.0.1:8080")
        self.url, self._token = url.rstrip("/"), token

    def run(self, overrides: Sequence[str], key: str | None = None, priority: int = 0) -> Result:
        """Submit a run, wait for its end, and return what ``trainer.run`` returns.

        Args:
            overrides: as of ``trainer.run``. key: the same key of this token is the same run, which is not started
                twice. priority: runs of higher priority start first.

        Raises:
            UserError: the service refuses the run, the token, or the overrides.
            RunFailed: the run was started and broke or was cancelled, or the service cannot be reached.
        """
        return self.result(self.submit(overrides, key, priority))

    def submit(self, overrides: Sequence[str], key: str | None = None, priority: int = 0) -> int:
        """Submit a run; returns its number."""
        new = {"overrides": [*overrides], "priority": priority, **({"key": key} if key is not None else {})}
        return int(self._ask("/api/runs", new)["number"])

    def result(self, number: int) -> Result:
        """Wait for the end of a run, and return its result."""
        while (run := self.show(number))["state"] not in OVER:
            time.sleep(POLL_S)
        found = run["result"] or {}
        if run["state"] != DONE:
            why = found.get("error") or f"{self.url}/api/runs/{number}/logs has its lines"
            raise RunFailed(f"run {number} {run['state']}: {why}")
        return Result(**{field.name: found[field.name] for field in fields(Result) if field.name in found})

    def show(self, number: int) -> dict[str, Any]:
        """A run with its state, config, result and pictures, as the API answers it."""
        found: dict[str, Any] = self._ask(f"/api/runs/{number}")
        return found

    def runs(self) -> list[dict[str, Any]]:
        """The runs that wait or live, and the newest ones that are over."""
        found: list[dict[str, Any]] = self._ask("/api/runs")["runs"]
        return found

    def metrics(self, number: int) -> list[dict[str, Any]]:
        """All points of a run, oldest first."""
        points: list[dict[str, Any]] = []
        after = 0
        while (found := self._ask(f"/api/runs/{number}/metrics?after={after}"))["points"]:
            points.extend(found["points"])
            after = found["next"]
        return points

    def cancel(self, number: int) -> str:
        """End a run, which saves a checkpoint first if it has begun; returns what was done."""
        return str(self._ask(f"/api/runs/{number}/cancel", {})["said"])

    def resume(self, number: int) -> str:
        """Queue a run again after its end, from its newest checkpoint; returns what was done."""
        return str(self._ask(f"/api/runs/{number}/resume", {})["said"])

    def retry(self, number: int) -> str:
        """Queue a run again after its end, from the start; returns what was done."""
        return str(self._ask(f"/api/runs/{number}/retry", {})["said"])

    def _ask(self, path: str, body: object = None) -> Any:
        """Send a request, with a body as a POST; returns the answer."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as answer:  # http and https alone  # nosec B310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            try:
                sentence = str(json.load(error)["error"])
            except (ValueError, KeyError, TypeError):
                sentence = str(error)
            raise UserError(self.url, sentence) from None
        except OSError as error:
            raise RunFailed(f"{self.url} does not answer: {error}") from error
