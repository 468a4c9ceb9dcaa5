"""``python -m tests.null_gpu.own_gpu FOLDER``: a worker does what it does on the second of two GPUs.

The answer is a list of steps, each with the GPUs that the process has opened by then, and the sentence for a lack of
memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.utils.data import Dataset

from tests.composed import ready
from tests.null_gpu.machine import leave
from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.tensor_tree import Packed, on_device, read
from trainer.checkpoint.writer import BackgroundWriter
from trainer.data.placement import Placement
from trainer.data.reader import Reader, Reading
from trainer.data.source import Splits
from trainer.errors import RunFailed
from trainer.host import ask_torch
from trainer.host.notes_board import SealedBoard
from trainer.host.transfers import Arriving, on_its_way
from trainer.run_folder.report import Phase, Report
from trainer.strategies.seat import Seat
from trainer.worker.batch_size_trial import TrialLimits, _limited_gpu
from trainer.worker.model import save
from trainer.worker.out_of_memory import memory_named
from trainer.worker.settings import settings
from trainer.worker.state import put_randomness, randomness

GPU = torch.device("cuda:1")
RUNTIME = ctypes.CDLL(None)


class Ones(Dataset[Any]):
    """Samples of ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        return torch.ones(3, 8, 8), 0


def opened() -> list[int]:
    """The GPUs that this process has opened."""
    return [number for number in range(2) if RUNTIME.null_gpu_is_open(number)]


def batches() -> None:
    """Read a batch in a reading process, and place it."""
    reader = Reader(Ones(), Reading(num_workers=1, pin_memory=True))
    place = Placement(Splits(Ones(), None, mean=(0.5,) * 3, std=(0.5,) * 3), GPU, torch.float32, True)
    for batch in reader.read([(0, np.arange(4)), (0, np.arange(4))]):
        place(*batch)
    reader.close()


def update() -> None:
    """Train one update with a fused optimizer, and read a number of it."""
    weight = torch.nn.Parameter(torch.ones(4, device=GPU))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale((weight * on_its_way(torch.ones(4), GPU)).sum()).backward()
    scaler.step(optimizer)
    Arriving([weight.detach()]).read()


def checkpoint(folder: Path) -> None:
    """Write a checkpoint in the background, and load it."""
    packed, writer = (
        Packed({"weight": torch.ones(4, device=GPU), **randomness(GPU)}, PinnedMemory()),
        BackgroundWriter(),
    )
    writer.begin(lambda: packed.write(folder / "part"))
    writer.wait()
    state = read(folder / "part")
    on_device(state.pop("weight"), GPU)
    put_randomness(GPU, **state)


class Tied(torch.nn.Module):
    """A model with a parameter of two names, an empty one, one of 16 bits, a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(5, 3)
        self.other = torch.nn.Linear(5, 3, bias=False)
        self.other.weight = self.one.weight
        self.norm = torch.nn.BatchNorm2d(7)
        self.short = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.none = torch.nn.Parameter(torch.zeros(0, 4))


def best_model(folder: Path) -> bool:
    """Whether the file of a model on the GPU has what that of the same model on the CPU has."""
    model, pinned, files = Tied(), PinnedMemory(), []
    for name, device in (("cpu", "cpu"), ("gpu", GPU), ("again", GPU)):
        save(model.to(device), folder / name, pinned=pinned)
        with safe_open(folder / name, "pt") as file:
            names = file.keys()
            files.append(({key: file.get_tensor(key) for key in names}, file.metadata()))
    (first, about), *others = files
    same = [
        tensors.keys() == first.keys() and metadata == about and all(torch.equal(tensors[n], first[n]) for n in first)
        for tensors, metadata in others
    ]
    return all(same) and pinned.free


def lack_of_memory(plan: Any) -> str:
    """The sentence for memory that is not enough."""
    report = Report(None, 4)
    report.phase = Phase.TRAINING
    try:
        with memory_named(plan, str(GPU), report):
            torch.empty(100 << 30, dtype=torch.uint8, device=GPU)
    except RunFailed as error:
        return str(error)
    return ""


def carelessly() -> None:
    """Wait for an event in a thread that does not say on which GPU: the runtime opens the first."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(GPU))
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()


def main(folder: Path) -> dict[str, Any]:
    """Do all steps."""
    assignment = ready("+recipe=digits_lenet", "tracking=none", "device=cpu", run_dir=str(folder)).assignment
    config, plan = assignment.config, assignment.plan
    seat = Seat("worker", 1, 2, 1, 2, str(GPU), SealedBoard(dist.HashStore(), b"x" * 32))
    found: list[tuple[str, list[int]]] = []

    def step(name: str, call: Callable[[], Any]) -> Any:
        value = call()
        found.append((name, opened()))
        return value

    step("ask torch for the GPUs", ask_torch.answer_here)
    step("limit the memory of a trial", lambda: _limited_gpu(TrialLimits(None, 0, [], 1), str(GPU)))
    with settings(config, plan, seat):
        step("settings", lambda: None)
        step("batches", batches)
        step("update", update)
        step("checkpoint", lambda: checkpoint(folder))
        same = step("best model", lambda: best_model(folder))
        said = step("lack of memory", lambda: lack_of_memory(plan))
    step("carelessly", carelessly)
    return {"steps": found, "said": said, "same": same}


if __name__ == "__main__":
    leave(main(Path(json.loads(sys.argv[1]))))
