"""Applies the plan's settings on GPUs in a worker: TF32, the allocator of memory, NCCL, NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainer.host import numa
from trainer.planning.chosen import GpuSettings
from trainer.planning.gpu_settings import VARIABLES

SEGMENTS = "expandable_segments:True"


@contextmanager
def on_gpu(chosen: GpuSettings, device: torch.device, captures: bool = False) -> Iterator[None]:
    """Context manager: the settings hold in this process, before it first asks CUDA for memory. The user's own
    variables stay as they are. ``captures``: updates are captured as a CUDA graph."""
    with ExitStack() as stack:
        if chosen.expandable_segments and not _set_by_user("expandable_segments"):
            stack.enter_context(variables(PYTORCH_CUDA_ALLOC_CONF=SEGMENTS))
        if chosen.nccl_priority:
            own = {"TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_DEBUG": "WARN"}
            stack.enter_context(variables(**{n: v for n, v in own.items() if n not in os.environ}))
        if captures and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:  # torch's condition for DDP in a graph
            stack.enter_context(variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"))
        if not _set_by_user("tf32"):
            stack.enter_context(tf32(chosen.tf32))
        if chosen.numa and not _set_by_user("numa") and (cores := cores_beside(device)):
            stack.enter_context(numa.bound(cores))
        yield


def _set_by_user(name: str) -> bool:
    return any(os.environ.get(variable) for variable in VARIABLES[name])


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Context manager: variables of this process have these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Context manager: matrix products and convolutions of fp32 use TF32, or do not.

    Set by torch's older functions: its compiler reads them, and they refuse to answer beside the newer ones (2.15).
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def cores_beside(device: torch.device) -> tuple[int, ...]:
    """The cores of a GPU's NUMA node that this process may use; empty: the machine does not say."""
    card: Any = torch.cuda.get_device_properties(device)
    bus_id = f"{card.pci_domain_id:08x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    nodes = numa.read([bus_id], os.sched_getaffinity(0))
    return tuple(nodes.cores.get(nodes.gpus[0], ()))
