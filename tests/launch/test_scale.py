"""Messages between the launchers of many hosts, and their bytes, grow as the number of hosts; so do their pauses."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.pace import patient
from trainer.errors import RunFailed
from trainer.host import notes_board
from trainer.host.notes_board import SealedBoard
from trainer.launch import rendezvous
from trainer.launch.engines.engine_folder import CHUNK, LogReader
from trainer.launch.lobby import MARK, TERMS, Guest, Lobby, RunOver
from trainer.launch.other_hosts import POLL_S, OtherHosts
from trainer.launch.rendezvous import LONGEST_WHY, POLLS_PER_S, Rendezvous, meet
from trainer.strategies import liveness
from trainer.strategies.liveness import RollCall
from trainer.strategies.process_group import ProcessGroup
from trainer.worker.shared_folder import is_shared

FEW, MANY = 8, 64
LONGEST_EXPONENT = 1.05
EACH = 10
"""Most messages of a worker in a roll call, however many workers there are."""
"""Of the number of hosts besides host 0, for messages and bytes: each costs as much as any other, but for the digits of
its number. N log N would be 1.31 here."""


class Counted:
    """A host's connection to a store, with the bytes of its distinct messages: a poll that is repeated counts once."""

    def __init__(self, store: dist.Store, sent: dict[Any, int], host: int) -> None:
        self.store, self.sent, self.host = store, sent, host

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(key: Any, *value: Any) -> Any:
            answer = getattr(self.store, name)(key, *value)
            keys = key if isinstance(key, list) else [key]
            read = answer if isinstance(answer, bytes) else b""
            self.sent[self.host, name, str(key)] = sum(map(len, [*keys, *map(str, value), read]))
            return answer

        return ask


def connections(hosts: int) -> tuple[list[Counted], dict[Any, int]]:
    store, sent = dist.HashStore(), dict[Any, int]()
    return [Counted(store, sent, number) for number in range(hosts)], sent


def assert_linear(sent_by: Callable[[int], dict[Any, int]]) -> None:
    few, many = sent_by(FEW), sent_by(MANY)
    assert len(few) >= FEW
    growths = [len(many) / len(few), sum(many.values()) / sum(few.values())]
    exponents = [math.log(growth) / math.log((MANY - 1) / (FEW - 1)) for growth in growths]
    assert max(exponents) <= LONGEST_EXPONENT, exponents


def fast_clock() -> Callable[[], float]:
    ticks: Iterator[int] = itertools.count()
    return lambda: 2 * POLL_S * next(ticks)


def test_a_meeting() -> None:
    terms = {f"key{number}": f"value {number}" for number in range(60)}

    def sent_by(hosts: int) -> dict[Any, int]:
        stores, sent = connections(hosts)
        everybody = [Rendezvous(number=n, hosts=hosts, terms=terms) for n in range(hosts)]
        with ThreadPoolExecutor(hosts) as pool:
            assert len(set(pool.map(meet, stores, everybody))) == 1
        return sent

    assert_linear(sent_by)


@pytest.mark.parametrize("dies", [True, False])
def test_an_end(dies: bool) -> None:
    def sent_by(hosts: int) -> dict[Any, int]:
        stores, sent = connections(hosts)
        links = [
            OtherHosts([SealedBoard(store, b"run")], Rendezvous(number=n, hosts=hosts), [], fast_clock())
            for n, store in enumerate(stores)
        ]
        if dies:
            links[hosts // 2].end("worker 3 was killed by SIGKILL")
            for link in reversed(links):
                if link is not links[hosts // 2]:
                    with suppress(RunFailed):
                        link.poll()
                    link.end("another host has ended the run")
        else:
            for link in reversed(links):
                link.leave({})
        return sent

    assert_linear(sent_by)


def test_lives_of_hosts_that_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()

    def sent_by(hosts: int) -> dict[Any, int]:
        stores, sent = connections(hosts)
        boards = [SealedBoard(store, b"lobby") for store in stores]
        boards[0].set(TERMS, "{}")
        boards[0].set(MARK, "mark")
        lobby, guests = Lobby(boards[0], hosts), [Guest(board, n, "", hosts) for n, board in enumerate(boards) if n]
        for guest in guests:
            guest.come(tmp_path, {})
        for life in (1, 2):
            lobby.begin(lobby.gather(hosts, 60, 0.0), 1, "")
            found = [guest.next_life(life - 1) for guest in guests]
            assert [(of.number, of.place) for of in found] == [(life, n) for n in range(1, hosts)]  # type: ignore[union-attr]
            for guest in guests:
                guest.tell(ended=life, how="preempted")
            assert len(lobby.settle(60)) == hosts - 1
        for guest in guests:
            guest.leave()
        lobby.end("done", "")
        assert {guest.next_life(2) for guest in guests} == {RunOver("done", "")}
        return sent

    assert_linear(sent_by)


def test_start_of_the_workers(tmp_path: Path) -> None:
    """What all wait for before they train: that all have joined the process group, and whether they share a folder."""

    def sent_by(workers: int) -> dict[Any, int]:
        stores, sent = connections(workers)
        seats: list[Any] = [
            SimpleNamespace(rank=n, size=workers, local_size=1, store=SealedBoard(store, b"run"))
            for n, store in enumerate(stores)
        ]

        def start(seat: Any) -> bool:
            group: Any = SimpleNamespace(seat=seat, limit=timedelta(seconds=60))
            for what in ("come", "joined"):
                ProcessGroup._wait_until_all_have(group, what)
            return is_shared(tmp_path, seat, 60)

        with ThreadPoolExecutor(workers) as pool:
            assert set(pool.map(start, seats)) == {True}
        return sent

    assert_linear(sent_by)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_roll_call(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers but one miss it at the same time: each finds out who it is."""
    monkeypatch.setattr(liveness, "ANSWER_S", patient(0.5))

    def sent_by(workers: int) -> dict[Any, int]:
        stores, sent = connections(workers)
        boards = [SealedBoard(store, b"run") for n, store in enumerate(stores) if n != absent]
        there = [RollCall(board, board.store.host, workers) for board in boards]
        for one in there:
            one.reached = 1
        with ThreadPoolExecutor(workers) as pool:
            assert [*pool.map(RollCall.missing, there)] == [[absent]] * (workers - 1)
        for one in there:
            one.end()
        return sent

    for workers in (FEW, MANY):  # by host, and not as a sum: who finds the collector's note there already asks less
        asked = Counter(host for host, *_ in sent_by(workers))
        collector = asked.pop(int(absent == 0))
        assert max(asked.values()) <= EACH and collector <= 2 * workers + EACH, asked


@pytest.mark.parametrize("number", [0, 1])
def test_hosts_that_wait_for_each_other_together_ask_no_more_often_than_few_do(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Store(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            nonlocal asked
            asked += 1
            return bool(super().check(keys))

    for module in (rendezvous, notes_board):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep, time_ns=lambda: 1))
    hosts, timeout_s = 1000, 60.0
    with pytest.raises(RunFailed):
        meet(Store(), Rendezvous(number=number, hosts=hosts, timeout_s=timeout_s))
    each_host_once = hosts if number == 0 else 0  # when the time is over, to name those who are missing
    assert asked <= each_host_once + 2 + now * POLLS_PER_S / hosts and now >= timeout_s


def test_reason_that_names_many_hosts_is_whole_at_host_0_and_short_for_the_others() -> None:
    store = dist.HashStore()

    def why(host: Rendezvous) -> str:
        with pytest.raises(RunFailed) as error:
            meet(store, host)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        whole, short = pool.map(why, [Rendezvous(number=number, hosts=400, timeout_s=1) for number in range(2)])
    assert whole.startswith(" and ".join(f"host {number}" for number in range(2, 400)) + " did not come to")
    assert short == f"{whole[:LONGEST_WHY]} ... (shortened for the other hosts)"


def test_log_without_an_end_of_line_is_read_in_pieces(tmp_path: Path) -> None:
    """A progress bar goes back to the beginning of its line, for hours."""
    text = "42% of an epoch\r" * (4 * CHUNK // 16)
    (tmp_path / "log").write_text(text)
    reader = LogReader(tmp_path / "log")
    pieces = list(reader.lines())
    assert max(map(len, pieces)) <= 2 * CHUNK and len(reader.rest) <= CHUNK
    assert text.startswith("".join(pieces)) and len("".join(pieces)) >= len(text) - CHUNK
