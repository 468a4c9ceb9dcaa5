"""``python -m tests.null_gpu.placing``: places images of bytes on a null GPU, and prints the kernels.

The question is ``{"channels_last": ..., "mean_std": ...}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.null_gpu import fakes
from tests.null_gpu.waits import Waits
from trainer.data.placement import Placement
from trainer.data.source import Splits


class Kernels(Waits):
    """Remembers the operators on the GPU, and the types of what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = sum(self.kernels.values())
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if sum(self.kernels.values()) > before:
            self.seen.append((func._schema.name, str(getattr(made, "dtype", ""))))
        return made


def placed(channels_last: bool, mean_std: bool) -> dict[str, Any]:
    """What happens after the copy to the GPU."""
    kernels = Kernels()
    splits = Splits(None, None, [0.5] * 3 if mean_std else None, [0.2] * 3 if mean_std else None)  # type: ignore[arg-type]
    with fakes.in_place(1, kernels), FakeTensorMode(allow_non_fake_inputs=True), kernels:
        place = Placement(splits, torch.device("cuda", 0), torch.float32, channels_last, torch.bfloat16)
        images = torch.zeros((4, 3, 8, 8), dtype=torch.uint8).to(memory_format=torch.channels_last).pin_memory()
        labels = torch.zeros(4, dtype=torch.int64).pin_memory()
        kernels.seen, kernels.found = [], type(kernels.found)()
        made, _ = place(images, labels)
    assert isinstance(made, torch.Tensor)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    return {
        "kernels": [one for one in kernels.seen if one[1]],
        "waits": sum(kernels.found.values()),
        "made": [str(made.dtype), made.device.type, made.is_contiguous(memory_format=memory)],
    }


if __name__ == "__main__":
    print(json.dumps(placed(**json.loads(sys.argv[1]))))
