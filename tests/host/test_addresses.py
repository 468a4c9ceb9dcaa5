"""Addresses of both versions of IP: which are this host's, which ports are free, and how they are written."""

from __future__ import annotations

import socket

import pytest

from trainer.host import addresses


@pytest.mark.parametrize(
    ("host", "written"), [("10.0.0.1", "10.0.0.1:29500"), ("node1", "node1:29500"), ("fd00::1", "[fd00::1]:29500")]
)
def test_address_with_a_port_is_written_as_everybody_reads_it(host: str, written: str) -> None:
    assert addresses.with_port(host, 29500) == written


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_own_addresses_are_known_and_ports_in_use_are_not_free(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with addresses.listening(host, 0) as busy:
        port = busy.getsockname()[1]
        assert not addresses.port_is_free(host, port) and addresses.port_is_free(host, 0)
    assert addresses.port_is_free(host, addresses.free_port(host))
    assert addresses.own(host) == addresses.address_towards(host) == host
    assert addresses.interface_of(host) == addresses.interface_towards(host) == "lo"


@pytest.mark.parametrize("host", ["240.0.0.1", "fd00:dead::1"])
def test_addresses_of_others_are_not_this_hosts(host: str) -> None:
    assert not addresses.port_is_free(host, 0) and addresses.own(host) == host
    assert addresses.interface_of(host) is None
