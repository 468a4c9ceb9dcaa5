"""Endpoints (address and port) as users write them, the ports of parameter servers, and the port where hosts meet."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import addresses
from trainer.host.addresses import with_port

HIGHEST = 65535
EXAMPLE = "10.0.0.1:8000,10.0.0.2:8000"
PORTS = "launch.server_ports"
MEETING_PORT = 29500
"""Where hosts meet where launch.master_port is not set: torchrun's port."""


@dataclass(frozen=True)
class Endpoint:
    """An address with a port, such as ``10.0.0.1:8000`` or ``[fd00::1]:8000``."""

    host: str
    port: int

    def __str__(self) -> str:
        return with_port(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Whether this is a loopback address, which leads each machine to itself."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback


def endpoints_of(key: str, text: str | None, example: str = EXAMPLE) -> tuple[Endpoint, ...]:
    """Parse a comma-separated list of endpoints; () if there is none.

    Raises:
        UserError: an endpoint is invalid, unreachable for others, or listed twice.
    """
    found: list[Endpoint] = []
    for word in filter(None, (word.strip() for word in (text or "").split(","))):
        if (endpoint := _endpoint(key, word, example)) in found:
            raise UserError(f"{key}={text}", f"{endpoint} stands there twice", f"{key}={example}")
        found.append(endpoint)
    if text is not None and not found:
        raise UserError(f"{key}={text}", "holds no endpoint", f"{key}={example}")
    return tuple(found)


def _endpoint(key: str, word: str, example: str) -> Endpoint:
    what, instead = f"{key}={word}", f"{key}={example}"
    host, colon, port = word.rpartition(":")
    if not colon or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise UserError(what, "is no address with a port; IPv6 addresses stand in brackets, [fd00::1]:8000", instead)
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= HIGHEST):
        raise UserError(what, f"{port or 'nothing'} is no port from 1 to {HIGHEST}", instead)
    ip = _ip(host := host.strip("[]"))
    if ip is not None and ip.is_unspecified:
        raise UserError(what, f"{host} is no address that others can connect to", instead)
    return Endpoint(host, int(port))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:  # a name
        return None


def server_ports(text: str | None, servers: int) -> list[int]:
    """The port of each parameter server, by number, from ``8000-8003`` or ``8000,8001``; [] if none are given.

    Raises:
        UserError: these are no ports, one is there twice, or they are too few.
    """
    if text is None:
        return []
    ports = [port for word in text.strip(" []").split(",") for port in _range(text, word.strip())]
    what, instead = f"{PORTS}={text}", f"{PORTS}=8000-{8000 + servers - 1}" if servers > 1 else f"{PORTS}=8000"
    if twice := next((port for port in ports if ports.count(port) > 1), 0):
        raise UserError(what, f"port {twice} is there twice, and each server needs its own", instead)
    if len(ports) < servers:
        raise UserError(what, f"is {len(ports)} for {servers} servers", instead)
    return ports[:servers]


def _range(text: str, word: str) -> range:
    first, dash, last = word.partition("-")
    numbers = [int(n) if n.isascii() and n.isdecimal() else 0 for n in (first, last if dash else first)]
    low, high = numbers
    if not 1 <= low <= high <= HIGHEST:
        raise UserError(
            f"{PORTS}={text}",
            f"{word or 'nothing'} is neither a port from 1 to {HIGHEST} nor a range of ports",
            f"{PORTS}=8000-8003",
        )
    return range(low, high + 1)


def check_port(config: RunConfig) -> None:
    """Refuse a meeting endpoint (launch.master_addr and launch.master_port) that is in use, or not of this host."""
    launch = config.launch
    if launch.role is not None:
        return
    port, serves = launch.master_port, launch.node_rank == 0
    address, single = launch.master_addr, launch.nnodes == 1
    if not (port and serves) or config.plan or addresses.port_is_free(address, port):
        return
    if not addresses.port_is_free(address, 0):
        own = schema.LaunchConfig.master_addr if single else addresses.address()
        raise UserError(
            f"launch.master_addr={address}",
            "is not this host's address, and host 0 serves the meeting",
            f"launch.master_addr={own}" + ("" if single else " (or launch.node_rank=1)"),
        )
    free = next((p for p in range(port + 1, 65536) if addresses.port_is_free(address, p)), MEETING_PORT)
    raise UserError(
        f"launch.master_port={port}",
        f"is in use on {address}",
        "launch.master_port=0" if single else f"launch.master_port={free}",
    )
