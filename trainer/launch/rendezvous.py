"""Several hosts become one run: each comes to host 0's store with what it is about to do, and all start or none does."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from trainer.errors import RunFailed, first_line
from trainer.host.addresses import LOOPBACK, with_port
from trainer.host.board import SealedBoard
from trainer.host.patient_store import PatientStore
from trainer.planning.run_secret import VARIABLE

Store = dist.Store | PatientStore

POLL_S = 0.2
TELL_S = 1.0
"""Time that host 0 leaves the others to read why nothing starts."""


@dataclass
class Meeting:
    """What this host's launcher knows of the run's hosts: their number and addresses, and which is this one. On one
    host there is no store.

    Attributes:
        host, port: of the store; number: this host's among ``hosts``, 0 for the one that serves it.
        timeout_s: longest wait until all are there; patience_s: for an answer of the store.
        secret: the user's; empty: none, and whoever reaches the store can write what the run's processes believe.
        addresses: of all hosts, where they are known.
        terms: what must be the same on all hosts, key and value.
        interface: the network interface for Gloo; None: Gloo's own choice.
        here: the address of this host, where its servers listen.
        env: further variables for the processes.
    """

    host: str = LOOPBACK
    port: int = 0
    number: int = 0
    hosts: int = 1
    timeout_s: float = 300.0
    patience_s: float = 600.0
    secret: str = field(default="", repr=False)
    interface: str | None = "lo"
    addresses: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    here: str = LOOPBACK
    env: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The address of host 0's store, as users write it."""
        return with_port(self.host, self.port)

    @property
    def store(self) -> str:
        """How host 0's store is named in messages."""
        return f"the store of host 0 at {self.where}"

    @property
    def serves(self) -> bool:
        """Whether this host is host 0, which serves the store."""
        return self.number == 0

    def name(self, number: int) -> str:
        """How a host is named in messages."""
        return f"host {number} ({self.addresses[number]})" if self.addresses else f"host {number}"


def meet(store: Store, meeting: Meeting) -> bytes:
    """The rendezvous of the hosts: wait until all are there; host 0 decides and the others learn it. Returns the run's
    secret of 32 bytes.

    Each host draws a number for this run alone, and the run's secret is the hash of all of them, keyed with the user's
    secret: it never travels, and nothing that was said in another run counts in this one.

    Raises:
        RunFailed: a host did not come in time, came twice, knows another secret, or was started with another command; it is
            named.
    """
    if store.add(f"hosts/count/{meeting.number}", 1) > 1:
        raise RunFailed(
            f"there is another {meeting.name(meeting.number)} already: every host needs a launch.node_rank of its own"
        )
    number = secrets.token_hex(32)
    store.set(f"hosts/number/{meeting.number}", number)
    if meeting.serves:
        return _decide(store, meeting)
    return _hear(store, meeting, number)


def _decide(store: Store, meeting: Meeting) -> bytes:
    """Host 0's part."""
    why = _who_did_not_come(store, meeting)
    keys = [f"hosts/number/{number}" for number in range(meeting.hosts)]
    numbers = [store.get(key).decode() if store.check([key]) else "" for key in keys]
    store.set("hosts/run", " ".join([_seal(meeting, numbers), *numbers]))
    secret = _secret(meeting, numbers)
    board = SealedBoard(store, secret)
    board.set("hosts/terms/0", json.dumps(meeting.terms, default=str))
    why = why or _who_knows_another_secret(board, meeting) or _who_does_something_else(board, meeting)
    board.set("hosts/why not", why)
    if why:
        time.sleep(TELL_S)
        raise RunFailed(why)
    return secret


def _hear(store: Store, meeting: Meeting, number: str) -> bytes:
    """The part of the others."""
    patience = datetime.timedelta(seconds=meeting.timeout_s + 2 * TELL_S)
    try:
        store.wait(["hosts/run"], patience)
        seal, *numbers = store.get("hosts/run").decode(errors="replace").split(" ")
        secret = _secret(meeting, numbers)
        board = SealedBoard(store, secret)
        board.set(f"hosts/terms/{meeting.number}", json.dumps(meeting.terms, default=str))
        own = numbers[meeting.number : meeting.number + 1] == [number]
        if not own or not hmac.compare_digest(seal.encode(), _seal(meeting, numbers).encode()):
            raise RunFailed(
                f"{meeting.name(0)} knows another secret than this host, or somebody else writes into the store at {meeting.where}. "
                f"Nothing of it was used. Give all hosts the same secret (launch.secret_file, or {VARIABLE})."
            )
        board.wait(["hosts/why not"], patience)
        why = board.get("hosts/why not").decode()
    except (RuntimeError, dist.DistError) as error:
        why = f"{meeting.name(0)} is gone before all hosts were there: {first_line(error)}"
    if why:
        raise RunFailed(why)
    return secret


def _secret(meeting: Meeting, numbers: Sequence[str]) -> bytes:
    """The run's secret. Where the user has none, whoever reads the numbers in the store knows it."""
    return _hash(meeting, numbers, b"secret")


def _seal(meeting: Meeting, numbers: Sequence[str]) -> str:
    """What only those can write who know the user's secret."""
    return _hash(meeting, numbers, b"numbers").hex()


def _hash(meeting: Meeting, numbers: Sequence[str], purpose: bytes) -> bytes:
    key = hashlib.sha256(meeting.secret.encode()).digest() if meeting.secret else b""
    return hashlib.blake2b(" ".join(numbers).encode(), key=key, person=purpose, digest_size=32).digest()


def _who_did_not_come(store: Store, meeting: Meeting) -> str:
    until, missing = time.monotonic() + meeting.timeout_s, list(range(meeting.hosts))
    while missing := [number for number in missing if not store.check([f"hosts/number/{number}"])]:
        if time.monotonic() > until:
            who = " and ".join(meeting.name(number) for number in missing)
            return f"{who} did not come to {meeting.where} within {meeting.timeout_s:g} s (launch.timeout_s)"
        time.sleep(POLL_S)
    return ""


def _who_knows_another_secret(board: SealedBoard, meeting: Meeting) -> str:
    """Empty when what all hosts do is there."""
    until = time.monotonic() + meeting.timeout_s
    for number in range(1, meeting.hosts):
        while not board.check([key := f"hosts/terms/{number}"]):
            if board.forged(key):
                return (
                    f"{meeting.name(number)} knows another secret than this host. Give all hosts the same secret "
                    f"(launch.secret_file, or {VARIABLE})."
                )
            if time.monotonic() > until:
                return f"{meeting.name(number)} came to {meeting.where}, and left without a word"
            time.sleep(POLL_S)
    return ""


def _who_does_something_else(board: SealedBoard, meeting: Meeting) -> str:
    mine, *others = (json.loads(board.get(f"hosts/terms/{number}")) for number in range(meeting.hosts))
    for number, terms in enumerate(others, 1):
        for key in sorted({*mine, *terms}):
            if mine.get(key) != terms.get(key):
                return (
                    f"{meeting.name(number)} was started with another command: {key} is {terms.get(key)} there and "
                    f"{mine.get(key)} on host 0. Type the same on all hosts."
                )
    return ""
