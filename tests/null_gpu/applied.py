"""``python -m tests.null_gpu.applied``: applies settings on a null GPU; prints what torch and the environment say then.

The question is ``{"variables": {...}}``, the user's own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch.cuda import memory

from trainer.planning.chosen import GpuSettings
from trainer.worker.gpu_settings import on_gpu

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY", "NCCL_DEBUG")


def state() -> dict[str, Any]:
    """What holds in this process."""
    products = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    return {
        "variables": {name: os.environ[name] for name in NAMES if name in os.environ},
        "tf32": [*products, torch.backends.cudnn.allow_tf32],
    }


def applied(variables: dict[str, str]) -> dict[str, Any]:
    """What holds before, within and after the settings, and what the allocator has read."""
    os.environ.update(variables)
    found = {"before": state()}
    with on_gpu(GpuSettings(tf32=True, expandable_segments=True, nccl_priority=True), torch.device("cuda", 0)):
        found["within"] = state()
        torch.cuda.init()
        found["allocator"] = memory._snapshot()["allocator_settings"]
    found["after"] = state()
    with on_gpu(GpuSettings(), torch.device("cuda", 0)):
        found["none"] = state()
    return found


if __name__ == "__main__":
    print(json.dumps(applied(**json.loads(sys.argv[1]))))
