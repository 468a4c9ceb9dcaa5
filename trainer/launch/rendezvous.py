"""The rendezvous of several hosts: each writes its terms into host 0's store; all start, or none does."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from trainer.errors import RunFailed, first_line
from trainer.host import json_text
from trainer.host.addresses import LOOPBACK, with_port
from trainer.host.notes_board import Board, NoNote, SealedBoard, wait_until
from trainer.host.patience import Patience
from trainer.host.patient_store import PatientStore
from trainer.planning.run_secret import VARIABLE

Store = dist.Store | PatientStore

ANY = "any"
"""The value of a term that does not concern this host."""
POLL_S = 0.2
TELL_S = 5.0
"""Longest wait of host 0 for the others to read why nothing starts."""
HEARD = "hosts/heard/{}"


@dataclass
class Meeting:
    """The run's hosts as this host's launcher knows them: their number, addresses, and which one this is.

    Attributes:
        host, port: of the store. number: this host's, below ``hosts``; host 0 serves the store.
        timeout_s: longest wait for all hosts. patience_s: longest wait for an answer of the store.
        secret: the user's; empty: anybody who reaches the store can write notes of the run.
        addresses: of all hosts, if they are known. labels: names of the hosts, if they are not ``host N``.
        terms: what must be the same on all hosts, by key.
        interface: the network interface for Gloo; None: Gloo chooses.
        here: the address of this host, at which its servers listen.
        env: further variables of the processes.
        watch: called while the hosts meet (with None) and while the processes run (with the run's board).
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
    labels: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    here: str = LOOPBACK
    env: dict[str, str] = field(default_factory=dict)
    watch: Callable[[Board | None], None] = lambda board: None

    @property
    def where(self) -> str:
        """The address and port of host 0's store."""
        return with_port(self.host, self.port)

    @property
    def store(self) -> str:
        """The name of host 0's store in messages."""
        return f"the store of {self.label(0)} at {self.where}"

    @property
    def serves(self) -> bool:
        """Whether this host is host 0, which serves the store."""
        return self.number == 0

    def name(self, number: int) -> str:
        """The name of a host in messages, with its address."""
        return f"{self.label(number)} ({self.addresses[number]})" if self.addresses else self.label(number)

    def label(self, number: int) -> str:
        """The name of a host in messages, without its address."""
        return self.labels[number] if self.labels else f"host {number}"

    def key(self, number: int) -> str:
        """The part of a host in the keys of notes; it does not depend on the number of hosts."""
        return self.labels[number].replace(" ", "/") if self.labels else str(number)

    @property
    def one(self) -> str:
        """``host``, or ``process`` if the run's processes are started one by one."""
        return "process" if self.labels else "host"

    @property
    def kind(self) -> str:
        """The plural of :attr:`one`."""
        return "processes" if self.labels else "hosts"

    @property
    def cannot_rejoin(self) -> str:
        """The message for a host that was part of the run already, and cannot rejoin it."""
        return (
            f"the run at {self.where} has begun, and {self.name(self.number)} was part of it already. A "
            f"{self.one} that is started again cannot come back. "
            "Let the others go on without it, or end all commands and start them again with resume=auto, from "
            "the newest checkpoint. "
            f"If the other one still runs, {self.duplicate}"
        )

    @property
    def duplicate(self) -> str:
        """The advice for two hosts with one number."""
        return (
            "every process needs a launch.rank of its own"
            if self.labels
            else "every host needs a launch.node_rank of its own"
        )


def meet(store: Store, meeting: Meeting) -> bytes:
    """Wait until all hosts are there and agree on the run; returns the run's secret (32 bytes).

    Each host draws a random number for this run. The run's secret is the hash of all numbers, keyed with the user's
    secret: it is never sent, and notes of other runs do not have it.

    Raises:
        RunFailed: a host did not come in time, came twice, has another secret, or was started with another command; the
            message names it.
    """
    key = meeting.key(meeting.number)
    if store.add(f"hosts/count/{key}", 1) > 1:
        raise RunFailed(
            meeting.cannot_rejoin
            if store.check(["hosts/run"])
            else f"there is another {meeting.name(meeting.number)} already: {meeting.duplicate}"
        )
    number = secrets.token_hex(32)
    store.set(f"hosts/number/{key}", number)
    if meeting.serves:
        return _decide(store, meeting)
    return _hear(store, meeting, number)


def _decide(store: Store, meeting: Meeting) -> bytes:
    """The part of host 0: wait for the numbers, compare the terms, and write the verdict."""
    why = _who_did_not_come(store, meeting)
    keys = [f"hosts/number/{meeting.key(number)}" for number in range(meeting.hosts)]
    numbers = [store.get(key).decode() if store.check([key]) else "" for key in keys]
    store.set("hosts/run", " ".join([_seal(meeting, numbers), *numbers]))
    secret = _secret(meeting, numbers)
    board = SealedBoard(store, secret)
    board.set(f"hosts/terms/{meeting.key(0)}", json.dumps(meeting.terms, default=str))
    why = why or _who_knows_another_secret(board, meeting) or _who_does_something_else(board, meeting)
    board.set("hosts/why not", why)
    if why:
        came = [HEARD.format(meeting.key(n)) for n in range(1, meeting.hosts) if numbers[n]]
        with suppress(NoNote):
            wait_until(lambda: not came or bool(store.check(came)), "their word", TELL_S)
        raise RunFailed(why)
    return secret


def _hear(store: Store, meeting: Meeting, number: str) -> bytes:
    """The part of the other hosts: wait for host 0's verdict."""
    patience_s = meeting.timeout_s + 2 * TELL_S
    try:
        wait_until(lambda: bool(store.check(["hosts/run"])), "its word", patience_s)
        seal, *numbers = store.get("hosts/run").decode(errors="replace").split(" ")
        secret = _secret(meeting, numbers)
        board = SealedBoard(store, secret)
        board.set(f"hosts/terms/{meeting.key(meeting.number)}", json.dumps(meeting.terms, default=str))
        sealed, why = hmac.compare_digest(seal.encode(), _seal(meeting, numbers).encode()), ""
        if sealed and number in numbers:
            board.wait(["hosts/why not"], datetime.timedelta(seconds=patience_s))
            why = board.get("hosts/why not").decode()
        with suppress(RuntimeError, dist.DistError):  # host 0 has waited long enough
            store.set(HEARD.format(meeting.key(meeting.number)), "")
        if sealed and number not in numbers and len(numbers) != meeting.hosts:
            raise RunFailed(
                f"{meeting.name(0)} was started for {len(numbers)} {meeting.kind}, without "
                f"{meeting.label(meeting.number)}. Type the same in all commands."
            )
        if number not in numbers or not sealed:
            raise RunFailed(
                f"{meeting.name(0)} knows another secret than this {meeting.one}, or somebody else writes "
                f"into the store at {meeting.where}. "
                f"Nothing of it was used. Give all {meeting.kind} the same secret (launch.secret_file, or {VARIABLE})."
            )
    except (RuntimeError, dist.DistError) as error:
        why = f"{meeting.name(0)} is gone before all hosts were there: {first_line(error)}"
    if why:
        raise RunFailed(why)
    return secret


def _secret(meeting: Meeting, numbers: Sequence[str]) -> bytes:
    """The run's secret; without a secret of the user, anybody who reads the numbers knows it."""
    return _hash(meeting, numbers, b"secret")


def _seal(meeting: Meeting, numbers: Sequence[str]) -> str:
    """A hash that proves the knowledge of the user's secret."""
    return _hash(meeting, numbers, b"numbers").hex()


def _hash(meeting: Meeting, numbers: Sequence[str], purpose: bytes) -> bytes:
    key = hashlib.sha256(meeting.secret.encode()).digest() if meeting.secret else b""
    return hashlib.blake2b(" ".join(numbers).encode(), key=key, person=purpose, digest_size=32).digest()


def _who_did_not_come(store: Store, meeting: Meeting) -> str:
    patience, missing = Patience(meeting.timeout_s, time.monotonic), list(range(meeting.hosts))
    while missing := [number for number in missing if not store.check([f"hosts/number/{meeting.key(number)}"])]:
        if patience.left() <= 0.0:
            who = " and ".join(meeting.name(number) for number in missing)
            return f"{who} did not come to {meeting.where} within {meeting.timeout_s:g} s (launch.timeout_s)"
        meeting.watch(None)
        time.sleep(POLL_S)
    return ""


def _who_knows_another_secret(board: SealedBoard, meeting: Meeting) -> str:
    """Why a host's terms are missing or not sealed with the secret; empty: all terms are there."""
    patience = Patience(meeting.timeout_s, time.monotonic)
    for number in range(1, meeting.hosts):
        while not board.check([key := f"hosts/terms/{meeting.key(number)}"]):
            if board.forged(key):
                return (
                    f"{meeting.name(number)} knows another secret than this {meeting.one}. Give all "
                    f"{meeting.kind} the same secret "
                    f"(launch.secret_file, or {VARIABLE})."
                )
            if patience.left() <= 0.0:
                return f"{meeting.name(number)} came to {meeting.where}, and left without a word"
            meeting.watch(None)
            time.sleep(POLL_S)
    return ""


def _who_does_something_else(board: SealedBoard, meeting: Meeting) -> str:
    own, *others = (json_text.loads(board.get(f"hosts/terms/{meeting.key(number)}")) for number in range(meeting.hosts))
    at, everywhere = ("at", "in all commands") if meeting.labels else ("on", "on all hosts")
    for number, terms in enumerate(others, 1):
        if key := differing(own, terms):
            return (
                f"{meeting.name(number)} was started with another command: {key} is {terms.get(key)} there and "
                f"{own.get(key)} {at} {meeting.label(0)}. Type the same {everywhere}."
            )
    return ""


def differing(first: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The first term in which another host differs from host 0, keys of ``launch`` last; empty: none."""
    keys = sorted({**first, **others}, key=lambda key: not key.startswith("launch."))
    return next((key for key in keys if first.get(key) != others.get(key) != ANY), "")
