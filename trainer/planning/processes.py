"""Lists the processes of a run: how many workers it has, the host, device and endpoint of each process, and how workers
and servers reach each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import schema
from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.host import hardware
from trainer.strategies.builtin import ADVISE, AUTO
from trainer.wording import counted


def choose_device(config: RunConfig) -> str:
    """Choose the device of the run's workers: ``cpu`` or ``cuda``."""
    if config.device != "auto":
        return str(config.device)
    return "cuda" if hardware.gpus() else "cpu"


def check_devices(config: RunConfig, device: str, nproc: int, gpus: int | None = None) -> None:
    """Refuse more workers on this host than it has GPUs, unless only a plan is asked for."""
    if device != "cuda" or config.plan or config.launch.role == "server":
        return
    gpus, about = len(hardware.gpus()) if gpus is None else gpus, hardware.about_gpus()
    if gpus == 0:
        instead = f"device=cpu (or {about.remedy})" if about.remedy else "device=cpu"
        raise UserError("device=cuda", f"this machine shows {about.why or 'no GPU'}", instead)
    alone = config.launch.role is not None and gpus == 1  # CUDA_VISIBLE_DEVICES shows each worker its own
    if nproc > gpus and not alone:
        concern = f" ({about.concern})" if about.concern else ""
        raise UserError(
            f"launch.nproc={nproc}",
            f"this host has {counted(gpus, 'GPU')}, and every worker needs its own{concern}",
            f"launch.nproc={gpus} (or device=cpu)",
        )


def transport_of(config: RunConfig, roles: Mapping[str, int]) -> str:
    """How values travel between workers and servers, as the plan shows it; '' without servers."""
    transport = config.node("strategy").get("transport")
    if "server" not in roles or transport is None:
        return ""
    if transport == "tcp" or config.launch.nnodes > 1:
        return "TCP, encrypted"
    if transport == "ipc":
        return "Unix sockets"
    from trainer.host import segments

    lacks = segments.what_lacks()
    return f"Unix sockets (no shared memory: {lacks})" if lacks else "Unix sockets, large values in shared memory"


def default_workers(config: RunConfig) -> int | None:
    """The number of workers that the strategy starts by default; None: one per GPU, or one."""
    target = config.strategy._target_
    return (
        None if target in (ADVISE, AUTO) else getattr(locate(str(target), "strategy._target_"), "default_workers", None)
    )


def workers_here(launch: schema.LaunchConfig, device: str, default: int | None = None) -> int:
    """The number of workers on each host; if processes are started one by one, those on this machine (at least 1)."""
    if launch.role is not None:
        from trainer.planning.launch_role import neighbours

        return max(1, len(neighbours(launch)))
    if launch.nproc is not None:
        return launch.nproc
    if launch.workers is not None:
        return launch.workers // int(launch.nnodes)
    return max(1, len(hardware.gpus())) if device == "cuda" else default or 1


def is_elsewhere(config: RunConfig, device: str, nproc: int) -> bool:
    """Whether a plan is for other hosts than this one alone: for several, or for one with more GPUs."""
    return bool(config.plan) and (config.launch.nnodes > 1 or (device == "cuda" and nproc > len(hardware.gpus())))


def workers_everywhere(launch: schema.LaunchConfig, here: int) -> int:
    """The number of workers on all hosts."""
    return launch.workers or here if launch.role is not None else here * int(launch.nnodes)


@dataclass(frozen=True)
class Process:
    """One process of the run: role, rank within the role, host number, index on that host, device.

    Attributes:
        endpoint: where it is: of a server where it listens, of a worker its host's address. Empty: only the start
        tells. pid: its number on its host; 0: not started yet.
    """

    role: str
    rank: int
    node: int
    local_rank: int
    device: str
    endpoint: str = ""
    pid: int = 0


def processes_of(roles: Mapping[str, int], launch: LaunchConfig, device: str) -> list[Process]:
    """List the run's processes, each with its host and device.

    Workers are spread evenly over the hosts, servers over the hosts of ``launch.server_hosts``; other roles sit on
    host 0."""
    if launch.role is not None:
        return _started_one_by_one(launch, device)
    found = []
    for role, size in roles.items():
        here = [0] * launch.nnodes
        for rank, (node, endpoint) in enumerate(_places(role, size, launch)):
            where = f"cuda:{here[node]}" if device == "cuda" and role == "worker" else "cpu"
            found.append(Process(role, rank, node, here[node], where, endpoint))
            here[node] += 1
    return found


def _places(role: str, size: int, launch: LaunchConfig) -> list[tuple[int, str]]:
    """The host of each process of a role, and its endpoint where that is known."""
    if role == "server":
        from trainer.planning.hosts import server_places

        return server_places(launch, size)
    each = size // launch.nnodes if role == "worker" else size
    return [(rank // each, "") for rank in range(size)]


def _started_one_by_one(launch: LaunchConfig, device: str) -> list[Process]:
    """The processes of a run whose commands start one process each. A worker has its own GPU if its command sees all
    GPUs of its machine; else it has the first that it sees."""
    from trainer.planning.launch_role import peers

    found, everybody = [], peers(launch)
    for node, peer in enumerate(everybody):
        where = "cpu"
        if peer.role == "worker" and device == "cuda":
            beside = [
                other for other in everybody if other.role == "worker" and other.endpoint.host == peer.endpoint.host
            ]
            where = f"cuda:{beside.index(peer) if len(hardware.gpus()) >= len(beside) else 0}"
        found.append(Process(peer.role, peer.rank, node, 0, where, str(peer.endpoint)))
    return found
