"""Several hosts become one run: each comes to host 0's store with what it is about to do, and all start or none does."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from trainer.errors import RunFailed, first_line

POLL_S = 0.2
TELL_S = 1.0
"""Time that host 0 leaves the others to read why nothing starts."""


@dataclass
class Meeting:
    """Where the processes of all hosts find each other: host 0's store. Port 0: a free one, on one host only.

    Attributes:
        host, port: of the store; number: this host's among ``hosts``, 0 for the one that serves it.
        addresses: of all hosts, where they are known.
        terms: what must be the same on all hosts, key and value.
        interface: the network interface for Gloo; None: Gloo's own choice.
        env: further variables for the processes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    number: int = 0
    hosts: int = 1
    timeout_s: float = 300.0
    interface: str | None = "lo"
    addresses: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """Whether the store is here."""
        return self.number == 0

    def name(self, number: int) -> str:
        """How a host is called in messages."""
        return f"host {number} ({self.addresses[number]})" if self.addresses else f"host {number}"


def meet(store: dist.Store, meeting: Meeting) -> None:
    """Wait until all hosts are there; host 0 decides and the others hear it.

    Raises:
        RunFailed: a host did not come in time, came twice, or was started with another command; it is named.
    """
    if meeting.hosts == 1:
        return
    if store.add(f"hosts/count/{meeting.number}", 1) > 1:
        raise RunFailed(
            f"there is another {meeting.name(meeting.number)} already: every host needs a launch.node_rank of its own"
        )
    store.set(f"hosts/terms/{meeting.number}", json.dumps(meeting.terms, default=str))
    if meeting.serves:
        why = _who_did_not_come(store, meeting) or _who_does_something_else(store, meeting)
        store.set("hosts/why not", why)
        if why:
            time.sleep(TELL_S)
            raise RunFailed(why)
        return
    try:
        store.wait(["hosts/why not"], datetime.timedelta(seconds=meeting.timeout_s + 2 * TELL_S))
        why = store.get("hosts/why not").decode()
    except (RuntimeError, dist.DistError) as error:
        why = f"{meeting.name(0)} is gone before all hosts were there: {first_line(error)}"
    if why:
        raise RunFailed(why)


def _who_did_not_come(store: dist.Store, meeting: Meeting) -> str:
    until, missing = time.monotonic() + meeting.timeout_s, list(range(meeting.hosts))
    while missing := [number for number in missing if not store.check([f"hosts/terms/{number}"])]:
        if time.monotonic() > until:
            who = " and ".join(meeting.name(number) for number in missing)
            return (
                f"{who} did not come to {meeting.host}:{meeting.port} within {meeting.timeout_s:g} s (launch.timeout_s)"
            )
        time.sleep(POLL_S)
    return ""


def _who_does_something_else(store: dist.Store, meeting: Meeting) -> str:
    mine, *others = (json.loads(store.get(f"hosts/terms/{number}")) for number in range(meeting.hosts))
    for number, terms in enumerate(others, 1):
        for key in sorted({*mine, *terms}):
            if mine.get(key) != terms.get(key):
                return (
                    f"{meeting.name(number)} was started with another command: {key} is {terms.get(key)} there and "
                    f"{mine.get(key)} on host 0. Type the same on all hosts."
                )
    return ""
