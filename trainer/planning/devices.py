"""Chooses between CPU and GPUs, and checks that this host has enough GPUs."""

from __future__ import annotations

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import hardware


def choose_device(config: RunConfig) -> str:
    """Choose the device of the run's workers: ``cpu`` or ``cuda``."""
    if config.device != "auto":
        return str(config.device)
    return "cuda" if hardware.gpus() else "cpu"


def check_devices(config: RunConfig, device: str, nproc: int, gpus: int | None = None) -> None:
    """Refuse more workers on this host than it has GPUs, unless only a plan is asked for."""
    if device != "cuda" or config.plan or config.launch.role == "server":
        return
    gpus = len(hardware.gpus()) if gpus is None else gpus
    if gpus == 0:
        raise UserError("device=cuda", "this machine shows no GPU", "device=cpu")
    alone = config.launch.role is not None and gpus == 1  # CUDA_VISIBLE_DEVICES shows each worker its own
    if nproc > gpus and not alone:
        raise UserError(
            f"launch.nproc={nproc}",
            f"this host has {gpus} GPU{'s' if gpus > 1 else ''}, and every worker needs its own",
            f"launch.nproc={gpus} (or device=cpu)",
        )
