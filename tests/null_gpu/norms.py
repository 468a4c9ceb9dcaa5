"""``python -m tests.null_gpu.norms``: by which library torch computes batch norm on a null GPU, for each type."""

from __future__ import annotations

import json

import torch


def libraries() -> dict[str, str]:
    """``Cudnn`` or ``Native`` by type of the images."""
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        images = torch.empty((2, 3, 4, 4), dtype=dtype, device="cuda", memory_format=torch.channels_last)
        channels = torch.empty(3, device="cuda")
        found[str(dtype)] = torch._C._select_batch_norm_backend(images, *[channels] * 4, True, 1e-5).name
    return found


if __name__ == "__main__":
    print(json.dumps(libraries()))
