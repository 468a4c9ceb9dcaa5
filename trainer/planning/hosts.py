"""Decides how many hosts a run has, which of them is this one, where they meet, and which have parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.host import addresses
from trainer.host.addresses import with_port
from trainer.planning.endpoints import MEETING_PORT, PORTS, server_ports
from trainer.planning.launch_role import check_strategy, on_roles, peers
from trainer.wording import counted


def on_hosts(config: RunConfig) -> RunConfig:
    """Return the config with its hosts filled in: their number, the first one's address, this one's number, a port.

    Raises:
        UserError: they contradict each other.
    """
    config = on_roles(_with_range(config))
    if config.launch.role is not None:
        return config
    if config.launch.ips:
        config = config.changed(launch=_of_addresses(config.launch, config.plan))
    _check_hosts(config.launch)
    if config.launch.nnodes > 1 and config.launch.master_port == 0:
        config = config.changed(launch={"master_port": MEETING_PORT})
    _check_workers(config.launch)
    _check_address(config.launch, config.plan)
    return config


def _with_range(config: RunConfig) -> RunConfig:
    """Return the config with ``launch.nnodes=MIN:MAX`` as two numbers. The plan is for MAX hosts; MIN are enough to go
    on."""
    if not isinstance(config.launch.nnodes, str):
        return config
    least, most = map(int, config.launch.nnodes.split(":"))
    return config.changed(launch={"nnodes": most, "least_nnodes": least})


def _of_addresses(launch: schema.LaunchConfig, plan_alone: bool) -> dict[str, Any]:
    """The number of hosts, the first host's address and this host's number, from launch.ips."""
    if not (hosts := hosts_of(launch)):
        raise UserError(f"launch.ips={launch.ips}", "holds no address", "launch.ips=10.0.0.1,10.0.0.2")
    here = [i for i, ip in enumerate(hosts) if addresses.port_is_free(ip, 0)]
    if not here and not plan_alone:
        own = addresses.address()
        raise UserError(
            f"launch.ips={launch.ips}",
            f"none of these addresses is this host's (its own is {own})",
            f"this command on those hosts, or launch.ips with {own} among its addresses, the same on all hosts",
        )
    return {"nnodes": len(hosts), "master_addr": hosts[0], "node_rank": here[0] if here else 0}


def _check_hosts(launch: schema.LaunchConfig) -> None:
    nnodes = launch.nnodes
    if launch.node_rank >= nnodes:
        raise UserError(
            f"launch.node_rank={launch.node_rank}",
            f"with launch.nnodes={nnodes} it must be below {nnodes}",
            "launch.node_rank=0",
        )


def _check_workers(launch: schema.LaunchConfig) -> None:
    """Refuse launch.workers that cannot be spread evenly over the hosts, or disagrees with launch.nproc."""
    nnodes, nproc, workers = launch.nnodes, launch.nproc, launch.workers
    if workers is None:
        return
    what = f"launch.workers={workers}"
    if workers < nnodes and not launch.ips:
        raise UserError(what, f"is not one for each of {nnodes} hosts", f"launch.nnodes={workers}")
    if workers % nnodes:
        raise UserError(
            what,
            f"cannot be spread evenly over {nnodes} hosts",
            f"launch.workers={max(nnodes, workers // nnodes * nnodes)}",
        )
    if nproc is not None and nproc * nnodes != workers:
        raise UserError(
            f"launch.nproc={nproc}",
            f"on {counted(nnodes, 'host')} disagrees with {what}",
            f"launch.nproc={workers // nnodes}",
        )


def hosts_of(launch: schema.LaunchConfig) -> list[str]:
    """The addresses of the hosts in ``launch.ips``, without brackets around IPv6; [] if it is not set."""
    return [ip for word in str(launch.ips or "").split(",") if (ip := word.strip(" []"))]


AUTO, ALL, FIRST = "auto", "all", "first"
SERVER_HOSTS = "launch.server_hosts"


def server_hosts(launch: LaunchConfig, servers: int) -> list[int]:
    """The host number of each parameter server, by server number; servers of one host have consecutive numbers.

    The servers are spread evenly over the chosen hosts; where the division leaves a rest, the first hosts have one
    more.

    Raises:
        UserError: there is no such host, a host would have no server, or the text names no hosts.
    """
    hosts = _chosen(launch, servers)
    if len(hosts) > servers:
        what, least = f"{SERVER_HOSTS}={launch.server_hosts}", len(hosts)
        why = f"{counted(servers, 'server')} cannot be on {counted(least, 'host')}: some would have none"
        raise UserError(what, why, f"launch.servers={least} (or {SERVER_HOSTS}=first)")
    each, rest = divmod(servers, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < rest))]


def server_places(launch: LaunchConfig, servers: int) -> list[tuple[int, str]]:
    """The host number of each parameter server, and its endpoint; endpoint empty: the start chooses the port."""
    nodes, ports = server_hosts(launch, servers), server_ports(launch.server_ports, servers)
    if not ports:
        return [(node, "") for node in nodes]
    return [(node, _endpoint(launch, node, port)) for node, port in zip(nodes, ports, strict=True)]


def _endpoint(launch: LaunchConfig, node: int, port: int) -> str:
    """A server's endpoint, as far as it is known."""
    if launch.nnodes == 1:
        return with_port(addresses.LOOPBACK, port)
    hosts = hosts_of(launch)
    return with_port(hosts[node], port) if hosts else f"port {port} of host {node}"


def _chosen(launch: LaunchConfig, servers: int) -> list[int]:
    text, everywhere = launch.server_hosts.strip(), list(range(launch.nnodes))
    if text == AUTO:
        return everywhere if servers >= launch.nnodes else [0]
    return {ALL: everywhere, FIRST: [0]}.get(text) or _numbers(text, launch.nnodes)


def _numbers(text: str, nnodes: int) -> list[int]:
    """The hosts of a list such as ``0,2``."""
    what, instead = f"{SERVER_HOSTS}={text}", f"{SERVER_HOSTS}=auto (or all, first, or hosts' numbers such as 0,1)"
    words = [word.strip() for word in text.split(",") if word.strip()]
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
                what, f"names host {host} twice", f"{SERVER_HOSTS}={','.join(map(str, dict.fromkeys(map(int, words))))}"
            )
        hosts.append(host)
    return hosts


def listens_at(launch: schema.LaunchConfig) -> str:
    """The address where this host's parameter servers listen: ``launch.address``, its own in launch.ips, else the one
    by which host 0 reaches it."""
    if everybody := peers(launch):
        return addresses.own(everybody[launch.node_rank].endpoint.host)
    if launch.nnodes == 1:
        return addresses.LOOPBACK
    if launch.address is not None:
        return addresses.own(launch.address)
    if hosts := hosts_of(launch):
        return addresses.own(hosts[launch.node_rank])
    if launch.node_rank == 0:
        return addresses.own(launch.master_addr)
    return addresses.address_towards(launch.master_addr) or addresses.address()


def own_address(launch: schema.LaunchConfig) -> str:
    """The address and network interface of this host in a run on several hosts, and why they were taken, in words."""
    address = listens_at(launch)
    interface = addresses.interface_of(address)
    if launch.address is not None:
        why = "launch.address"
    elif hosts_of(launch):
        why = "launch.ips"
    elif launch.node_rank == 0:
        why = "launch.master_addr"
    else:
        why = f"of the route to {launch.master_addr}; launch.address sets another"
    return f"{address}{f' ({interface})' if interface else ''}: {why}"


def _check_address(launch: schema.LaunchConfig, plan_alone: bool) -> None:
    """Refuse an address of this host at which it cannot listen."""
    if launch.address is None or plan_alone or addresses.port_is_free(launch.address, 0):
        return
    own = ", ".join(addresses.all_addresses())
    raise UserError(
        f"launch.address={launch.address}", f"is not an address of this host ({own})", "launch.address=null"
    )


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
