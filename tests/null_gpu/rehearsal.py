"""``python -m tests.null_gpu.rehearsal '{"part": NAME}'``: a part of benchmarks/gpu.py on a null GPU, in small.

Prints its rows as JSON. Rates are of no meaning, because nothing computes. Beside the exceptions of ``fakes.py``: the
workers run in this process, a rival's DDP has the buckets of ours, nothing is compiled, the profiler sees two kernels
that are not there, and torch's own mode that shows waits is not set. Files are read without the modes of this process,
as a reading process has none, and photographs that a GPU decodes or holds are black.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from tests.composed import ready
from tests.null_gpu import fakes
from tests.null_gpu.count import GPU
from tests.null_gpu.machine import leave
from tests.null_gpu.waits import Waits
from tests.pictures import silent
from trainer.data.images import cache, dataset, encoded
from trainer.host import hardware
from trainer.host.notes_board import SealedBoard
from trainer.strategies.seat import Seat
from trainer.worker.train import seated

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import gpu_ours
import gpu_rivals

SMALL = gpu.Size("resnet18", batch=8, small=4, batches=2, rounds=1, image=32, photographs=40)


def in_this_process(function: str, overrides: list[str], rounds: int, question: dict[str, Any]) -> dict[str, Any]:
    """What :func:`gpu.in_a_worker` does, in this process."""
    folder = tempfile.mkdtemp()
    with patch.object(hardware, "gpus", lambda: (GPU,)), _disable_current_modes():
        job = ready(*overrides, *gpu.ON_ONE_GPU, "data.num_workers=0", run_dir=folder)
        job.checked.source.prepare(job.checked.facts, silent)
    config, plan = job.assignment.config, job.assignment.plan
    board = SealedBoard(dist.HashStore(), b"x" * 32)
    seat = seated(Seat("worker", 0, 1, 0, 1, "cuda:0", board, group_store=dist.HashStore()), config, plan)
    found: dict[str, Any] = getattr(gpu_ours, function)(
        seat, {"assignment": job.assignment, "rounds": rounds, **question}
    )
    return found


def _in_buckets(*args: Any, **options: Any) -> Any:
    ddp = DistributedDataParallel(*args, **options)
    fakes.in_buckets(ddp, "none")
    return ddp


class _AtOnce:
    """The thread that decodes, without a thread: modes belong to the thread that has set them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self, **options: Any) -> None:
        pass


def _black(parts: list[torch.Tensor], device: Any) -> list[torch.Tensor]:
    return [torch.zeros(3, 64, 48, dtype=torch.uint8, device=device) for _ in parts]


def _mapped(map_file: Any) -> Any:
    """``Decoded.__init__``, which copies a mapped file to a GPU by its size alone."""

    def init(self: Any, folder: Path, device: torch.device | None = None) -> None:
        map_file(self, folder)
        if device is not None:
            self.pixels = torch.zeros(self.pixels.shape, dtype=torch.uint8, device=device)

    return init


def rows(part: str) -> list[dict[str, Any]]:
    """The rows of a part."""
    waits = Waits()
    with (
        fakes.in_place(1, waits),
        patch.object(gpu_rivals, "DistributedDataParallel", _in_buckets),
        patch.object(gpu, "kernel_times", lambda loop: {"bn_forward": loop() * 1.0, "convolution": 9.0}),
        patch.object(nn.Module, "compile", lambda self, **options: None),
        patch.object(torch.cuda, "set_sync_debug_mode", lambda mode: None),
        patch.object(dataset, "decode", fakes.on_host(dataset.decode)),
        patch.object(encoded.EncodedImages, "augmented", fakes.on_host(encoded.EncodedImages.augmented)),
        patch.object(encoded, "ThreadPoolExecutor", _AtOnce),
        patch.object(cache.Decoded, "__init__", _mapped(cache.Decoded.__init__)),
        patch("torchcodec.decoders.decode_jpeg", _black),
        patch.object(torch.Tensor, "tolist", fakes.on_host(torch.Tensor.tolist)),
        patch.object(torch.Tensor, "numpy", fakes.on_host(torch.Tensor.numpy)),
        FakeTensorMode(allow_non_fake_inputs=True),
        waits,
    ):
        return [row._asdict() for row in gpu.PARTS[part].measure(gpu.Bench(SMALL, in_this_process))]


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        answer = rows(**json.loads(sys.argv[1]))
    leave(answer)
