"""Where each process of a run is: its host, its device, and its endpoint if known before the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.schema import LaunchConfig
from trainer.host import addresses, hardware
from trainer.host.addresses import with_port
from trainer.planning.endpoints import server_ports
from trainer.planning.processes import hosts_of
from trainer.planning.roles import Peer, peers
from trainer.planning.server_hosts import server_hosts


@dataclass(frozen=True)
class Process:
    """One process of the run: role, rank within the role, host number, index on that host, device.

    Attributes:
        endpoint: where it is: of a server where it listens, of a worker its host's address. Empty: only the start tells.
        pid: its number on its host; 0: not started yet.
    """

    role: str
    rank: int
    node: int
    local_rank: int
    device: str
    endpoint: str = ""
    pid: int = 0


def processes_of(roles: Mapping[str, int], launch: LaunchConfig, device: str) -> list[Process]:
    """List the run's processes.
    Workers are spread evenly over the hosts, servers over the hosts of ``launch.server_hosts``; other roles sit on
    host 0."""
    if everybody := peers(launch):
        return [_alone(node, peer, everybody, device) for node, peer in enumerate(everybody)]
    found = []
    ports = server_ports(launch.server_ports, roles.get("server", 0))
    for role, size in roles.items():
        here = [0] * launch.nnodes
        for rank, node in enumerate(_nodes(role, size, launch)):
            where = f"cuda:{here[node]}" if device == "cuda" and role == "worker" else "cpu"
            at = _listening(launch, node, ports[rank]) if role == "server" and ports else ""
            found.append(Process(role, rank, node, here[node], where, at))
            here[node] += 1
    return found


def _alone(node: int, peer: Peer, everybody: list[Peer], device: str) -> Process:
    """A process that is started by a command of its own. A worker has its own GPU where its command sees those of its
    machine, else the first of those that it sees."""
    if peer.role != "worker" or device != "cuda":
        return Process(peer.role, peer.rank, node, 0, "cpu", str(peer.endpoint))
    beside = [other for other in everybody if other.role == "worker" and other.endpoint.host == peer.endpoint.host]
    gpu = beside.index(peer) if len(hardware.gpus()) >= len(beside) else 0
    return Process(peer.role, peer.rank, node, 0, f"cuda:{gpu}", str(peer.endpoint))


def _nodes(role: str, size: int, launch: LaunchConfig) -> list[int]:
    """The host of each process of a role."""
    if role == "worker":
        return [rank // (size // launch.nnodes) for rank in range(size)]
    return server_hosts(launch, size) if role == "server" else [0] * size


def _listening(launch: LaunchConfig, node: int, port: int) -> str:
    """A server's endpoint, as far as it is known."""
    if launch.nnodes == 1:
        return with_port(addresses.LOOPBACK, port)
    hosts = hosts_of(launch)
    return with_port(hosts[node], port) if hosts else f"port {port} of host {node}"
