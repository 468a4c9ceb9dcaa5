"""Decides how many hosts a run has, which of them is this one, and where they meet."""

from __future__ import annotations

from typing import Any

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import addresses, hardware
from trainer.planning.endpoints import MEETING_PORT
from trainer.planning.started_one_by_one import on_roles
from trainer.wording import counted


def is_elsewhere(config: RunConfig, device: str, nproc: int) -> bool:
    """Whether a plan is for other hosts than this one alone: for several, or for one with more GPUs."""
    return bool(config.plan) and (config.launch.nnodes > 1 or (device == "cuda" and nproc > len(hardware.gpus())))


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
    return config


def _with_range(config: RunConfig) -> RunConfig:
    """Return the config with ``launch.nnodes=MIN:MAX`` as two numbers: planned for MAX hosts, it goes on with MIN."""
    if not isinstance(config.launch.nnodes, str):
        return config
    least, most = map(int, config.launch.nnodes.split(":"))
    return config.changed(launch={"nnodes": most, "least_nnodes": least})


def _of_addresses(launch: schema.LaunchConfig, plan_alone: bool) -> dict[str, Any]:
    """launch.ips says how many hosts there are, which is the first, and which is this one."""
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
    """launch.workers can be spread evenly over the hosts, and launch.nproc agrees with it."""
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
