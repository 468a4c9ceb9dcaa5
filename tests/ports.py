"""Ports for tests of how processes meet: those of testing processes side by side differ, and the system gives them to
nobody else."""

from __future__ import annotations

import secrets
import socket

BELOW_EPHEMERAL = range(10_000, 29_000)


def ports(number: int) -> list[int]:
    """Free ones. Drawn by the system: a run in the testing process has seeded Python's generator, as those beside it
    have."""
    found: list[int] = []
    while len(found) < number:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := secrets.choice(BELOW_EPHEMERAL)))
            except OSError:
                continue
        found += [port] if port not in found else []
    return found
