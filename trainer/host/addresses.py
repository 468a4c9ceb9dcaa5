"""Addresses and ports of hosts, IPv4 and IPv6: format them, find free ports, find how others reach this host."""

from __future__ import annotations

import socket
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def with_port(host: str, port: int | str) -> str:
    """Join an address and a port: ``10.0.0.1:29500``; IPv6 in brackets: ``[fd00::1]:29500``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on a port at an IP address of this host now; port 0 checks the address alone."""
    return any(_can_listen(family, address) for family, address in _resolved(host, port))


def free_port(host: str) -> int:
    """Return a TCP port at an address of this host on which nobody listens now."""
    with listening(host, 0) as probe:
        return int(probe.getsockname()[1])


def listening(host: str, port: int, backlog: int = 1) -> socket.socket:
    """Open a TCP socket that listens at one IP address of this host; port 0: on a free port.

    Raises:
        OSError: it is not this host's, or the port is in use.
    """
    here = [(family, address) for family, address in _resolved(host, port) if _can_listen(family, address)]
    family, address = here[0] if here else (socket.AF_INET, (host, port))
    return socket.create_server(address, family=family, backlog=backlog)


def own(host: str) -> str:
    """Resolve a name to this host's IP address; returns the name itself if it is another host's."""
    return next((str(address[0]) for family, address in _resolved(host, 0) if _can_listen(family, address)), host)


def address_towards(host: str) -> str | None:
    """The IP address under which another host reaches this host; None if there is no route."""
    for family, address in _resolved(host, 9):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing: the kernel chooses the way and the address to be reached at
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_towards(host: str) -> str | None:
    """The network interface through which another host reaches this host; None if unknown."""
    address = address_towards(host)
    return None if address is None else interface_of(address)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IP address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(e.family in FAMILIES and _plain(e.address) == _plain(address) for e in addresses):
            return str(name)
    return None


def address() -> str:
    """An IP address of this host that others can reach, IPv4 if it has one; the loopback address if there is none."""
    entries = [e for found in psutil.net_if_addrs().values() for e in found if e.family in FAMILIES]
    entries.sort(key=lambda e: FAMILIES.index(e.family))
    return str(next((e.address for e in entries if not e.address.startswith(("127.", "::1", "fe80:"))), LOOPBACK))


def all_addresses() -> list[str]:
    """The IP addresses of this host, without link-local ones."""
    entries = [e for found in psutil.net_if_addrs().values() for e in found if e.family in FAMILIES]
    return [_plain(e.address) for e in entries if not e.address.startswith("fe80:")]


def _resolved(host: str, port: int) -> list[tuple[Any, Any]]:
    """Family and address for each address of a name."""
    try:
        return [
            (family, address)
            for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            if family in FAMILIES
        ]
    except (OSError, UnicodeError):
        return []


def _can_listen(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _plain(address: str) -> str:
    """The address without the interface of a link-local one: ``fe80::1%eth0`` -> ``fe80::1``."""
    return address.partition("%")[0]
