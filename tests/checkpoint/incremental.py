"""Servers that write increments of small tables, too. Real processes, started by the command line with
``strategy._target_=tests.checkpoint.incremental.Sync``."""

from __future__ import annotations

from typing import Any

from trainer.strategies import builtin
from trainer.strategies.pserver.server import increments, server
from trainer.strategies.seat import Seat


def serve(seat: Seat, run: Any) -> dict[str, Any]:
    """As a server's own entry. Three increments follow each full part."""
    increments.LEAST = 1
    increments.Increments.pays = lambda self, share: len(self.shares) % 4 > 0  # type: ignore[method-assign]
    return server.serve(seat, run)


class Sync(builtin.PserverSyncDeclaration):
    """As strategy=pserver_sync."""

    entries = {"server": "tests.checkpoint.incremental:serve"}


def serve_one_full_part(seat: Seat, run: Any) -> dict[str, Any]:
    """As a server's own entry. Increments alone follow the first full part of a life."""
    increments.LEAST = 1
    increments.Increments.pays = lambda self, share: True  # type: ignore[method-assign]
    return server.serve(seat, run)


class Async(builtin.PserverAsyncDeclaration):
    """As strategy=pserver_async."""

    entries = {"server": "tests.checkpoint.incremental:serve_one_full_part"}
