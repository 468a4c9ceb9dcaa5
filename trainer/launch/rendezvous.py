"""The rendezvous of several hosts: each writes its terms into host 0's store; all start, or none does.

Notes in the store, in this order:

    hosts/number/HOST   each host: a random number, drawn for this meeting
    hosts/answer/HOST   host 0, to each host that has come: the proof that host 0 has read that number
    hosts/run           host 0: how many hosts there are, and its own number, from which the run's secret is made
    hosts/terms/HOST    each host: its terms, sealed with the run's secret
    hosts/why not       host 0: why nothing starts; empty: all start

No host reads notes of the others but host 0's, and none of these grows with the number of hosts: a meeting of N hosts
costs messages and bytes in proportion to N.
"""

from __future__ import annotations

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
from trainer.host.notes_board import QUICKEST_S, Board, NoNote, SealedBoard, wait_until
from trainer.host.patience import Patience
from trainer.host.patient_store import PatientStore
from trainer.planning.run_secret import VARIABLE

Store = dist.Store | PatientStore

ANY = "any"
"""The value of a term that does not concern this host."""
POLL_S = 0.2
TELL_S = 5.0
"""Longest wait of host 0 for the others to read why nothing starts."""
RUN, ANSWER, WHY_NOT = "hosts/run", "hosts/answer/{}", "hosts/why not"
NUMBER, TERMS, HEARD = "hosts/number/{}", "hosts/terms/{}", "hosts/heard/{}"
POLLS_PER_S, LONGEST_PAUSE_S = 1000.0, 2.0
"""What all hosts of a run together may ask of host 0 while they wait, and the longest pause of one of them."""
LONGEST_WHY = 1000
"""Characters of a reason that all hosts read; the host that gives it shows all of it."""


def pause_of(hosts: int, least_s: float) -> float:
    """Seconds between two polls of one of so many hosts that read notes in host 0's store; at least ``least_s``."""
    return max(least_s, min(LONGEST_PAUSE_S, hosts / POLLS_PER_S))


def for_all(why: str) -> str:
    """A reason for the notes that all hosts read: it may name many hosts."""
    return why if len(why) <= LONGEST_WHY else f"{why[:LONGEST_WHY]} ... (shortened for the other hosts)"


@dataclass
class Rendezvous:
    """The run's hosts as this host's launcher knows them: how many there are, which one this is, and where they meet.

    Attributes:
        host, port: of host 0's store. number: of this host, from 0. hosts: how many there are.
        timeout_s: longest wait for all hosts. patience_s: longest wait for an answer of the store.
        secret: the user's; empty: anybody who reaches the store can write notes of the run.
        addresses: of all hosts, if they are known. labels: names of the hosts, if they are not ``host N``.
        terms: what must be the same on all hosts, by key.
        here: the address of this host, at which its servers listen. named_here: the user has named it.
        watch: called while the hosts meet (with None) and while the processes run (with the run's board).
        store_opened: host 0's store, if the hosts have opened it before; None: it is opened when they meet.
    """

    host: str = LOOPBACK
    port: int = 0
    number: int = 0
    hosts: int = 1
    timeout_s: float = 300.0
    patience_s: float = 600.0
    secret: str = field(default="", repr=False)
    addresses: Sequence[str] = ()
    labels: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    here: str = LOOPBACK
    named_here: bool = False
    watch: Callable[[Board | None], None] = lambda board: None
    store_opened: Any = None

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
        return f"every {self.one} needs a {'launch.rank' if self.labels else 'launch.node_rank'} of its own"


def meet(store: Store, rendezvous: Rendezvous) -> bytes:
    """Wait until all hosts are there and agree on the run; returns the run's secret (32 bytes).

    Each host draws a random number. The run's secret is a hash of host 0's number, keyed with the user's secret: it is
    never sent, and notes of other runs do not have it. Host 0 proves to each host, with a hash that is keyed likewise,
    that it has read the host's number: what it wrote in another run proves nothing.

    Raises:
        RunFailed: a host did not come in time, came twice, has another secret, or was started with another command; the
            message names it.
    """
    key = rendezvous.key(rendezvous.number)
    if store.add(f"hosts/count/{key}", 1) > 1:
        raise RunFailed(
            rendezvous.cannot_rejoin
            if store.check([RUN])
            else f"there is another {rendezvous.name(rendezvous.number)} already: {rendezvous.duplicate}"
        )
    number = secrets.token_hex(32)
    store.set(NUMBER.format(key), number)
    return _decide(store, rendezvous, number) if rendezvous.serves else _hear(store, rendezvous, number)


def _decide(store: Store, rendezvous: Rendezvous, run: str) -> bytes:
    """The part of host 0: wait for the others' numbers, answer each, compare the terms, and write the verdict."""
    missing = _who_did_not_come(store, rendezvous)
    came = {number: rendezvous.key(number) for number in range(1, rendezvous.hosts) if number not in missing}
    for key in came.values():
        store.set(ANSWER.format(key), _proof(rendezvous, run, key, store.get(NUMBER.format(key)).decode()))
    store.set(RUN, f"{_proof(rendezvous, run, str(rendezvous.hosts))} {rendezvous.hosts} {run}")
    secret = _hash(rendezvous, b"secret", run)
    board = SealedBoard(store, secret)
    why = ""
    if missing:
        who = " and ".join(rendezvous.name(number) for number in sorted(missing))
        why = f"{who} did not come to {rendezvous.where} within {rendezvous.timeout_s:g} s (launch.timeout_s)"
    why = why or _who_knows_another_secret(board, rendezvous) or _who_does_something_else(board, rendezvous)
    board.set(WHY_NOT, for_all(why))
    if why:
        heard = [HEARD.format(key) for key in came.values()]
        with suppress(NoNote):
            pause_s = pause_of(rendezvous.hosts, QUICKEST_S)
            wait_until(lambda: not heard or bool(store.check(heard)), "their word", TELL_S, pause_s)
        raise RunFailed(why)
    return secret


def _hear(store: Store, rendezvous: Rendezvous, number: str) -> bytes:
    """The part of the other hosts: wait for host 0's verdict."""
    key, pause_s = rendezvous.key(rendezvous.number), pause_of(rendezvous.hosts, QUICKEST_S)
    patience_s = rendezvous.timeout_s + 2 * TELL_S
    try:
        wait_until(lambda: bool(store.check([RUN])), "its word", patience_s, pause_s)
        seal, hosts, run = [*store.get(RUN).decode(errors="replace").split(" "), "", ""][:3]
        secret = _hash(rendezvous, b"secret", run)
        board = SealedBoard(store, secret)
        board.set(TERMS.format(key), json.dumps(rendezvous.terms, default=str))
        answer = store.get(ANSWER.format(key)) if store.check([ANSWER.format(key)]) else b""
        sealed = _is(seal.encode(), _proof(rendezvous, run, hosts))
        expected = sealed and _is(answer, _proof(rendezvous, run, key, number))
        why = ""
        if expected:
            wait_until(lambda: board.check([WHY_NOT]), "its verdict", patience_s, pause_s)
            why = board.get(WHY_NOT).decode()
        with suppress(RuntimeError, dist.DistError):  # host 0 has waited long enough
            store.set(HEARD.format(key), "")
        if sealed and not expected and hosts != str(rendezvous.hosts):
            raise RunFailed(
                f"{rendezvous.name(0)} was started for {hosts} {rendezvous.kind}, without "
                f"{rendezvous.label(rendezvous.number)}. Type the same in all commands."
            )
        if sealed and not answer:  # it writes its answers first
            raise RunFailed(
                f"{rendezvous.name(0)} had given up at {rendezvous.where} before {rendezvous.name(rendezvous.number)} "
                f"came. All {rendezvous.kind} have to come within {rendezvous.timeout_s:g} s (launch.timeout_s)"
            )
        if not expected:
            raise RunFailed(
                f"{rendezvous.name(0)} knows another secret than this {rendezvous.one}, or somebody else writes "
                f"into the store at {rendezvous.where}. Nothing of it was used. "
                f"Give all {rendezvous.kind} the same secret (launch.secret_file, or {VARIABLE})."
            )
    except (RuntimeError, dist.DistError) as error:
        why = f"{rendezvous.name(0)} is gone before all hosts were there: {first_line(error)}"
    if why:
        raise RunFailed(why)
    return secret


def _hash(rendezvous: Rendezvous, purpose: bytes, *words: str) -> bytes:
    """A hash of some words, keyed with the user's secret; without a secret, anybody who knows the words knows it."""
    key = hashlib.sha256(rendezvous.secret.encode()).digest() if rendezvous.secret else b""
    return hashlib.blake2b(json.dumps(words).encode(), key=key, person=purpose, digest_size=32).digest()


def _proof(rendezvous: Rendezvous, *words: str) -> str:
    """The text by which host 0 proves that it knows the user's secret, and has read these words."""
    return _hash(rendezvous, b"proof", *words).hex()


def _is(found: bytes, proof: str) -> bool:
    return hmac.compare_digest(found, proof.encode())


def _who_did_not_come(store: Store, rendezvous: Rendezvous) -> set[int]:
    """Wait for all hosts' numbers; returns the hosts that did not come in time."""
    patience, pause_s = Patience(rendezvous.timeout_s, time.monotonic), pause_of(rendezvous.hosts, POLL_S)
    keys = {number: NUMBER.format(rendezvous.key(number)) for number in range(1, rendezvous.hosts)}
    while keys and not store.check([*keys.values()]):
        if patience.left() <= 0.0:
            return {number for number, key in keys.items() if not store.check([key])}
        rendezvous.watch(None)
        time.sleep(pause_s)
    return set()


def _who_knows_another_secret(board: SealedBoard, rendezvous: Rendezvous) -> str:
    """Why a host's terms are missing or not sealed with the secret; empty: all terms are there."""
    patience, pause_s = Patience(rendezvous.timeout_s, time.monotonic), pause_of(rendezvous.hosts, POLL_S)
    for number in range(1, rendezvous.hosts):
        while not board.check([key := TERMS.format(rendezvous.key(number))]):
            if board.forged(key):
                return (
                    f"{rendezvous.name(number)} knows another secret than this {rendezvous.one}. "
                    f"Give all {rendezvous.kind} the same secret (launch.secret_file, or {VARIABLE})."
                )
            if patience.left() <= 0.0:
                return f"{rendezvous.name(number)} came to {rendezvous.where}, and left without a word"
            rendezvous.watch(None)
            time.sleep(pause_s)
    return ""


def _who_does_something_else(board: SealedBoard, rendezvous: Rendezvous) -> str:
    """Why the hosts do not start, if one has other terms than host 0; empty: all have the same."""
    own = json_text.loads(json.dumps(rendezvous.terms, default=str))
    at, everywhere = ("at", "in all commands") if rendezvous.labels else ("on", "on all hosts")
    for number in range(1, rendezvous.hosts):
        terms = json_text.loads(board.get(TERMS.format(rendezvous.key(number))))
        if key := differing(own, terms):
            return (
                f"{rendezvous.name(number)} was started with another command: {key} is {terms.get(key)} there and "
                f"{own.get(key)} {at} {rendezvous.label(0)}. Type the same {everywhere}."
            )
    return ""


def differing(first: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The first term in which another host differs from host 0, keys of ``launch`` last; empty: none."""
    keys = sorted({**first, **others}, key=lambda key: not key.startswith("launch."))
    return next((key for key in keys if first.get(key) != others.get(key) != ANY), "")
