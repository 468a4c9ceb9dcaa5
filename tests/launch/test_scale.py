"""Messages between the launchers of many hosts grow no faster than N log N. A poll that is repeated counts once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from trainer.errors import RunFailed
from trainer.host.notes_board import SealedBoard
from trainer.launch.engines.engine_folder import CHUNK, LogReader
from trainer.launch.lobby import MARK, TERMS, Guest, Lobby
from trainer.launch.other_hosts import POLL_S, OtherHosts
from trainer.launch.rendezvous import Rendezvous, meet

FEW, MANY = 8, 64
N_LOG_N = MANY * math.log(MANY) / (FEW * math.log(FEW))


class Counted:
    """A host's connection to a store, with its distinct messages."""

    def __init__(self, store: dist.Store, sent: set[Any], host: int) -> None:
        self.store, self.sent, self.host = store, sent, host

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(key: Any, *value: Any) -> Any:
            self.sent.add((self.host, name, str(key)))
            return getattr(self.store, name)(key, *value)

        return ask


def connections(hosts: int) -> tuple[list[Counted], set[Any]]:
    store, sent = dist.HashStore(), set[Any]()
    return [Counted(store, sent, number) for number in range(hosts)], sent


def fast_clock() -> Callable[[], float]:
    ticks: Iterator[int] = itertools.count()
    return lambda: 2 * POLL_S * next(ticks)


def test_messages_of_a_meeting() -> None:
    def messages(hosts: int) -> int:
        stores, sent = connections(hosts)
        with ThreadPoolExecutor(hosts) as pool:
            secrets = set(pool.map(meet, stores, [Rendezvous(number=n, hosts=hosts) for n in range(hosts)]))
        assert len(secrets) == 1
        return len(sent)

    assert messages(FEW) >= FEW and messages(MANY) <= N_LOG_N * messages(FEW)


@pytest.mark.parametrize("dies", [True, False])
def test_messages_of_an_end(dies: bool) -> None:
    def messages(hosts: int) -> int:
        stores, sent = connections(hosts)
        links = [
            OtherHosts([SealedBoard(store, b"run")], Rendezvous(number=n, hosts=hosts), [], fast_clock())  # type: ignore[arg-type]
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
        return len(sent)

    assert messages(FEW) >= FEW and messages(MANY) <= N_LOG_N * messages(FEW)


def test_messages_of_a_lobby(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()

    def messages(hosts: int) -> int:
        stores, sent = connections(hosts)
        boards = [SealedBoard(store, b"lobby") for store in stores]
        boards[0].set(TERMS, "{}")
        boards[0].set(MARK, "mark")
        lobby, guests = Lobby(boards[0], hosts), [Guest(board, n, "", hosts) for n, board in enumerate(boards) if n]
        for guest in guests:
            guest.come(tmp_path, {})
        lobby.begin(lobby.gather(hosts, 60, 0.0), 1, "")
        assert {guest.next_life(0).number for guest in guests} == {1}  # type: ignore[union-attr]
        for guest in guests:
            guest.leave()
        lobby.end("done", "")
        return len(sent)

    assert messages(FEW) >= FEW and messages(MANY) <= N_LOG_N * messages(FEW)


def test_log_without_an_end_of_line_is_read_in_pieces(tmp_path: Path) -> None:
    """A progress bar goes back to the beginning of its line, for hours."""
    text = "42% of an epoch\r" * (4 * CHUNK // 16)
    (tmp_path / "log").write_text(text)
    reader = LogReader(tmp_path / "log")
    pieces = list(reader.lines())
    assert max(map(len, pieces)) <= 2 * CHUNK and len(reader.rest) <= CHUNK
    assert text.startswith("".join(pieces)) and len("".join(pieces)) >= len(text) - CHUNK
