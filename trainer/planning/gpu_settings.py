"""Chooses settings of torch, CUDA and NCCL on GPUs: TF32, the allocator of memory, priorities, NUMA nodes.

Some can be set by variables, too. The user's own variables win, and the plan says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.chosen import BY_USER, GpuSettings
from trainer.planning.precision import AMPERE
from trainer.visible import shortened

if TYPE_CHECKING:
    from trainer.host.numa import Nodes

VARIABLES: dict[str, tuple[str, ...]] = {
    "tf32": ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    "expandable_segments": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "nccl_priority": ("TORCH_NCCL_HIGH_PRIORITY",),
    "numa": ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
}
"""The user's variables that decide in place of a key."""
NOWHERE = -1
"""Number of the node of a GPU of which the machine does not say it."""
LONGEST = 60


@dataclass(frozen=True)
class GpuCase:
    """What these settings depend on.

    Attributes:
        device: ``cpu`` or ``cuda``. capability: compute capability of the weakest GPU; None: not known here.
        typed: the precision was not chosen by ``auto``. workers_here: on this host. several: there are several workers,
        over all hosts. servers: parameter servers exchange the gradients. variables: of the user. nodes: the NUMA nodes
        of this machine; None: not known. elsewhere: the run is for other machines. windows: GPUs come through Windows'
        subsystem for Linux.
    """

    device: str
    precision: str
    typed: bool
    workers_here: int
    capability: tuple[int, int] | None = None
    several: bool = False
    servers: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: Nodes | None = None
    elsewhere: bool = False
    windows: bool = False


def gpu_settings(config: RunConfig, case: GpuCase) -> tuple[GpuSettings, dict[str, str]]:
    """Choose the settings; returns them, and the reason of each that ``auto`` or a variable decided.

    Raises:
        UserError: a key asks for what cannot be.
    """
    chosen, why = {}, {}
    asked = {name: getattr(config.execution, name) for name in asdict(GpuSettings())}
    by_auto = {
        "tf32": _tf32(config, case),
        "expandable_segments": _segments(case),
        "nccl_priority": _priority(case),
        "numa": _numa(case),
    }
    for name, wanted in asked.items():
        value, reason = by_auto[name]
        variable = next((one for one in VARIABLES[name] if case.variables.get(one)), "")
        if variable and case.device == "cuda":
            chosen[name] = False
            shown = shortened(case.variables[variable], LONGEST)
            why[name] = f"{variable}={shown}{BY_USER}"
        elif wanted == "auto":
            chosen[name], why[name] = value, reason
        else:
            _check_asked(name, wanted, case)
            chosen[name] = bool(wanted)
    return GpuSettings(**chosen), why


def _check_asked(name: str, wanted: Any, case: GpuCase) -> None:
    """Refuse ``true`` where there is nothing that could be set.

    Raises:
        UserError: there is not.
    """
    key = f"execution.{name}={spelled(wanted)}"
    if not wanted:
        return
    if case.device != "cuda":
        raise UserError(key, "is for GPUs, and this run trains on CPUs", f"execution.{name}=auto")
    if name == "numa" and not case.elsewhere and NOWHERE in _nodes_of_workers(case):
        why = "the machine does not say at which NUMA node each GPU is (/sys/bus/pci/devices/*/numa_node)"
        raise UserError(key, why, "execution.numa=auto")
    if name == "tf32" and case.capability is not None and case.capability < AMPERE:
        shown = ".".join(map(str, case.capability))
        raise UserError(key, f"TF32 begins with compute capability 8.0, and a GPU has {shown}", "execution.tf32=auto")


def _tf32(config: RunConfig, case: GpuCase) -> tuple[bool, str]:
    if case.device != "cuda" or (case.capability is not None and case.capability < AMPERE):
        return False, "for GPUs of compute capability 8.0 or newer"
    if case.precision == "fp64":
        return False, "fp64 has none of it"
    if config.execution.deterministic:
        return False, "execution.deterministic=true: the same numbers on every card"
    if case.typed and case.precision == "fp32":
        return False, "precision=fp32 is typed, which means all 24 bits; execution.tf32=true is faster"
    return True, "inputs of products are rounded to 11 bits, more than bf16 has"


def _segments(case: GpuCase) -> tuple[bool, str]:
    if case.device != "cuda":
        return False, "for GPUs"
    if case.windows:
        return False, "Windows' subsystem for Linux has none"
    return True, "blocks of memory grow, so that none lies idle because it is too small"


def _priority(case: GpuCase) -> tuple[bool, str]:
    if case.device != "cuda":
        return False, "for GPUs"
    if case.servers:
        return False, "parameter servers exchange the gradients"
    if not case.several:
        return False, "one worker exchanges nothing"
    return True, "an exchange does not wait behind the backward that it overlaps"


def _nodes_of_workers(case: GpuCase) -> list[int]:
    nodes = list(case.nodes.gpus[: case.workers_here]) if case.nodes is not None else []
    return nodes + [NOWHERE] * (case.workers_here - len(nodes))


def _numa(case: GpuCase) -> tuple[bool, str]:
    if case.device != "cuda":
        return False, "for GPUs"
    if case.elsewhere:
        return False, "not known here"
    cores, nodes = case.nodes.cores if case.nodes is not None else {}, _nodes_of_workers(case)
    if len(cores) <= 1:
        return False, "this process has the cores of one NUMA node" if cores else "no NUMA nodes"
    if NOWHERE in nodes:
        return False, "the machine does not say at which NUMA node each GPU is"
    if lacking := sorted(set(nodes) - set(cores)):
        return False, f"this process may use no core of node {lacking[0]}, where a GPU is"
    if idle := sorted(set(cores) - set(nodes)):
        return False, f"the cores of node {idle[0]}, which has no worker, would read nothing"
    placed = [f"cuda:{number} at node {node}" for number, node in enumerate(nodes)]
    return True, ", ".join(placed)


def cores_of_a_worker(case: GpuCase) -> int:
    """The cores that the worker with the fewest has, if each is bound to its node."""
    workers = Counter(_nodes_of_workers(case))
    cores = case.nodes.cores if case.nodes is not None else {}
    return min(max(1, len(cores.get(node, ())) // number) for node, number in workers.items())
