"""Decides how many processes a run has, on which hosts and devices, and by which strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import addresses, hardware
from trainer.planning.endpoints import PORTS, server_ports
from trainer.planning.roles import check_strategy, neighbours, on_roles, peers
from trainer.planning.server_hosts import server_hosts
from trainer.strategies.builtin import AUTO
from trainer.wording import counted

PORT = 29500
"""Where hosts meet unless somebody says: torchrun's."""


def is_elsewhere(config: RunConfig, device: str, nproc: int) -> bool:
    """Whether a plan is for other machines than this one: for several hosts, or for GPUs that are not here."""
    return bool(config.plan) and (config.launch.nnodes > 1 or (device == "cuda" and nproc > len(hardware.gpus())))


def choose_device(config: RunConfig) -> str:
    """Choose the device of the run's processes: ``cpu`` or ``cuda``."""
    if config.device != "auto":
        return str(config.device)
    return "cuda" if hardware.gpus() else "cpu"


def default_workers(config: RunConfig) -> int | None:
    """The number of workers that the strategy starts by default; None: one per GPU, or one."""
    target = config.strategy._target_
    return None if target == AUTO else getattr(locate(str(target), "strategy._target_"), "default_workers", None)


def on_hosts(config: RunConfig) -> RunConfig:
    """Return the config with its hosts filled in: their number, the first one's address, this one's number, a port.

    Raises:
        UserError: they contradict each other.
    """
    config = on_roles(with_range(config))
    if config.launch.role is not None:
        return config
    if config.launch.ips:
        config = config.changed(launch=_of_addresses(config.launch, config.plan))
    _check_hosts(config.launch)
    if config.launch.nnodes > 1 and config.launch.master_port == 0:
        config = config.changed(launch={"master_port": PORT})
    _check_workers(config.launch)
    return config


def with_range(config: RunConfig) -> RunConfig:
    """Return the config with ``launch.nnodes=MIN:MAX`` as two numbers: planned for MAX hosts, it goes on with MIN."""
    if not isinstance(config.launch.nnodes, str):
        return config
    least, most = map(int, config.launch.nnodes.split(":"))
    return config.changed(launch={"nnodes": most, "least_nnodes": least})


def workers_here(launch: schema.LaunchConfig, device: str, default: int | None = None) -> int:
    """The number of workers on each host; if processes are started one by one, those on this machine (at least 1)."""
    if launch.role is not None:
        return max(1, len(neighbours(launch)))
    if launch.nproc is not None:
        return launch.nproc
    if launch.workers is not None:
        return launch.workers // int(launch.nnodes)
    return max(1, len(hardware.gpus())) if device == "cuda" else default or 1


def workers_everywhere(launch: schema.LaunchConfig, here: int) -> int:
    """The number of workers on all hosts."""
    return launch.workers or here if launch.role is not None else here * int(launch.nnodes)


def listens_at(launch: schema.LaunchConfig) -> str:
    """The address where this host's servers listen: its own in launch.ips, else the one by which host 0 reaches it."""
    if everybody := peers(launch):
        return addresses.own(everybody[launch.node_rank].endpoint.host)
    if launch.nnodes == 1:
        return addresses.LOOPBACK
    if hosts := hosts_of(launch):
        return addresses.own(hosts[launch.node_rank])
    if launch.node_rank == 0:
        return addresses.own(launch.master_addr)
    return addresses.address_towards(launch.master_addr) or addresses.address()


def _of_addresses(launch: schema.LaunchConfig, plan_alone: bool) -> dict[str, Any]:
    """launch.ips says how many hosts there are, which is the first, and which is this one."""
    if not (hosts := hosts_of(launch)):
        raise UserError(f"launch.ips={launch.ips}", "holds no address", "launch.ips=10.0.0.1,10.0.0.2")
    here = [i for i, ip in enumerate(hosts) if addresses.port_is_free(ip, 0)]
    if not here and not plan_alone:
        raise UserError(f"launch.ips={launch.ips}", "none of these addresses is this host's")
    return {"nnodes": len(hosts), "master_addr": hosts[0], "node_rank": here[0] if here else 0}


def _check_hosts(launch: schema.LaunchConfig) -> None:
    nnodes = launch.nnodes
    if launch.node_rank >= nnodes:
        raise UserError(f"launch.node_rank={launch.node_rank}", f"with launch.nnodes={nnodes} it must be below {nnodes}", "launch.node_rank=0")  # fmt: skip


def _check_workers(launch: schema.LaunchConfig) -> None:
    """launch.workers can be spread evenly over the hosts, and launch.nproc agrees with it."""
    nnodes, nproc, workers = launch.nnodes, launch.nproc, launch.workers
    if workers is None:
        return
    what = f"launch.workers={workers}"
    if workers < nnodes and not launch.ips:
        raise UserError(what, f"is not one for each of {nnodes} hosts", f"launch.nnodes={workers}")
    if workers % nnodes:
        raise UserError(what, f"cannot be spread evenly over {nnodes} hosts", f"launch.workers={max(nnodes, workers // nnodes * nnodes)}")  # fmt: skip
    if nproc is not None and nproc * nnodes != workers:
        raise UserError(f"launch.nproc={nproc}", f"on {counted(nnodes, 'host')} disagrees with {what}", f"launch.nproc={workers // nnodes}")  # fmt: skip


def hosts_of(launch: schema.LaunchConfig) -> list[str]:
    """The addresses in ``launch.ips``, without brackets around IPv6; [] if it is not set."""
    return [ip for word in str(launch.ips or "").split(",") if (ip := word.strip(" []"))]


def check_devices(config: RunConfig, device: str, nproc: int, gpus: int | None = None) -> None:
    """Refuse more workers on this host than it has GPUs, unless only a plan is asked for."""
    if device != "cuda" or config.plan or config.launch.role == "server":
        return
    gpus = len(hardware.gpus()) if gpus is None else gpus
    if gpus == 0:
        raise UserError("device=cuda", "this machine shows no GPU", "device=cpu")
    alone = config.launch.role is not None and gpus == 1  # CUDA_VISIBLE_DEVICES shows each worker its own
    if nproc > gpus and not alone:
        raise UserError(f"launch.nproc={nproc}", f"this host has {gpus} GPU{'s' if gpus > 1 else ''}, and every worker needs its own", f"launch.nproc={gpus} (or device=cpu)")  # fmt: skip


def with_strategy(config: RunConfig, workers: int) -> tuple[RunConfig, str]:
    """Return the config with ``strategy=auto`` replaced, for this many workers, and the reason; '' if none was."""
    if config.strategy._target_ != AUTO:
        return config, ""
    chosen = schema.StrategyConfig if workers == 1 else schema.CollectiveStrategy
    given = {k: v for k, v in config.node("strategy").items() if k != "_target_"}
    why = "one worker" if workers == 1 else f"{workers} workers"
    return config.replaced("strategy", {**asdict(chosen()), **given}), why


def check_port(config: RunConfig) -> None:
    """Refuse a meeting port that is in use on the host that serves it."""
    launch = config.launch
    if launch.role is not None:
        return
    port, serves = launch.master_port, launch.node_rank == 0
    address, single = launch.master_addr, launch.nnodes == 1
    if not (port and serves) or config.plan or addresses.port_is_free(address, port):
        return
    if not addresses.port_is_free(address, 0):
        mine = schema.LaunchConfig.master_addr if single else addresses.address()
        raise UserError(f"launch.master_addr={address}", "is not this host's address, and host 0 serves the meeting", f"launch.master_addr={mine}" + ("" if single else " (or launch.node_rank=1)"))  # fmt: skip
    free = next((p for p in range(port + 1, 65536) if addresses.port_is_free(address, p)), PORT)
    raise UserError(f"launch.master_port={port}", f"is in use on {address}", "launch.master_port=0" if single else f"launch.master_port={free}")  # fmt: skip


def check_servers(config: RunConfig, strategy: str, roles: Mapping[str, int]) -> None:
    """Refuse parameter servers whose hosts, ports or endpoints are invalid."""
    check_strategy(config.launch, strategy, roles)
    if servers := roles.get("server"):
        server_hosts(config.launch, servers)
        check_server_ports(config, servers)


def check_server_ports(config: RunConfig, servers: int) -> None:
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
