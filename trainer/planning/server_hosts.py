"""Decides on which hosts the parameter servers run (``launch.server_hosts``), and checks where they listen."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.host import addresses
from trainer.planning.endpoints import PORTS, server_ports
from trainer.planning.hosts import hosts_of
from trainer.planning.started_one_by_one import check_strategy, peers
from trainer.wording import counted

AUTO, ALL, FIRST = "auto", "all", "first"
KEY = "launch.server_hosts"


def server_hosts(launch: LaunchConfig, servers: int) -> list[int]:
    """The host number of each parameter server, by server number; servers of one host have consecutive numbers.

    The servers are spread evenly over the chosen hosts; where the division leaves a rest, the first hosts have one
    more.

    Raises:
        UserError: there is no such host, a host would have no server, or the text names no hosts.
    """
    hosts = _chosen(launch, servers)
    if len(hosts) > servers:
        what, least = f"{KEY}={launch.server_hosts}", len(hosts)
        why = f"{counted(servers, 'server')} cannot be on {counted(least, 'host')}: some would have none"
        raise UserError(what, why, f"launch.servers={least} (or {KEY}=first)")
    each, rest = divmod(servers, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < rest))]


def _chosen(launch: LaunchConfig, servers: int) -> list[int]:
    told, everywhere = launch.server_hosts.strip(), list(range(launch.nnodes))
    if told == AUTO:
        return everywhere if servers >= launch.nnodes else [0]
    return {ALL: everywhere, FIRST: [0]}.get(told) or _numbers(told, launch.nnodes)


def _numbers(told: str, nnodes: int) -> list[int]:
    """The hosts of a list such as ``0,2``."""
    what, instead = f"{KEY}={told}", f"{KEY}=auto (or all, first, or hosts' numbers such as 0,1)"
    words = [word.strip() for word in told.split(",") if word.strip()]
    if not words:
        raise UserError(what, "names no host", instead)
    hosts: list[int] = []
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise UserError(what, f"{word} is no host's number, and neither auto, all nor first", instead)
        if (host := int(word)) >= nnodes:
            last = f"the last of {nnodes} is host {nnodes - 1}" if nnodes > 1 else "the run has host 0 alone"
            raise UserError(what, f"there is no host {word}: {last} (launch.nnodes, launch.ips)", instead)
        if host in hosts:
            raise UserError(
                what, f"names host {host} twice", f"{KEY}={','.join(map(str, dict.fromkeys(map(int, words))))}"
            )
        hosts.append(host)
    return hosts


def listens_at(launch: schema.LaunchConfig) -> str:
    """The address where this host's parameter servers listen: its own in launch.ips, else the one by which host 0
    reaches it."""
    if everybody := peers(launch):
        return addresses.own(everybody[launch.node_rank].endpoint.host)
    if launch.nnodes == 1:
        return addresses.LOOPBACK
    if hosts := hosts_of(launch):
        return addresses.own(hosts[launch.node_rank])
    if launch.node_rank == 0:
        return addresses.own(launch.master_addr)
    return addresses.address_towards(launch.master_addr) or addresses.address()


def check_servers(config: RunConfig, strategy: str, roles: Mapping[str, int]) -> None:
    """Refuse parameter servers on hosts that do not exist, or at ports that are invalid or in use."""
    check_strategy(config.launch, strategy, roles)
    if servers := roles.get("server"):
        server_hosts(config.launch, servers)
        _check_server_ports(config, servers)


def _check_server_ports(config: RunConfig, servers: int) -> None:
    """Refuse server ports that are invalid, or in use where one of this host's servers must listen."""
    launch = config.launch
    ports = server_ports(launch.server_ports, servers)
    if not ports or config.plan:
        return
    host, what = listens_at(launch), f"{PORTS}={launch.server_ports}"
    nodes = server_hosts(launch, servers)
    for port in (port for port, node in zip(ports, nodes, strict=True) if node == launch.node_rank):
        meets = launch.nnodes > 1 and launch.node_rank == 0 and port == launch.master_port
        if meets or not addresses.port_is_free(host, port):
            why = "launch.master_port, where the hosts meet" if meets else f"in use on {host}"
            raise UserError(what, f"port {port} is {why}", f"{PORTS}={port + 1}-{port + servers}")
