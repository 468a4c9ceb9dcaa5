"""A port that is closed to newcomers for a while keeps who is connected, and lets the others in afterwards."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from tests.pace import wait_for
from trainer.strategies.pserver.protocol.listener import Listener


@contextlib.contextmanager
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    """A connection that may still be under way."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as made:
        made.setblocking(False)
        made.connect_ex(address)
        yield made


def connected(one: socket.socket, within_s: float = 0.0) -> bool:
    return bool(select.select([], [one], [], within_s)[1]) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_is_connected_stays_and_newcomers_wait(host: str) -> None:
    listener = Listener(host, 0)
    place = listener.endpoint.rpartition(":")
    assert place[0].removeprefix("tcp://").strip("[]") == host
    address = host, int(place[2])
    with socket.socket(fileno=listener.handed_over()) as taken, client(address) as first:
        assert connected(first, 60)
        here, _ = taken.accept()
        with here:
            listener.let_in(False)
            listener.let_in(False)
            with client(address) as late:
                assert not connected(late, 0.3)
                first.sendall(b"still here")
                here.settimeout(60)
                assert here.recv(100) == b"still here"
                listener.let_in(True)
                listener.let_in(True)
                wait_for(lambda: connected(late, 1), 60, "its packet is sent again, and taken")
    listener.close()


def test_port_in_use_is_refused() -> None:
    listener = Listener("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", int(listener.endpoint.rpartition(":")[2]))
    listener.close()
