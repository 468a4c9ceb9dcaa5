"""Copies in one piece of memory are the tensors, bit by bit, and stay until they are written."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_tensor_tree import assert_same
from trainer.checkpoint import durable_folder, pinned
from trainer.checkpoint.pinned import ALIGNED, PinnedMemory
from trainer.checkpoint.tensor_tree import Packed
from trainer.checkpoint.writer import write_part
from trainer.config.schema import CheckpointConfig
from trainer.host.notes_board import SealedBoard
from trainer.strategies.seat import Seat
from trainer.worker import checkpoints
from trainer.worker.checkpoints import Checkpoints

EMPTY = torch.empty
TENSORS = [
    torch.randn(3, 5),
    torch.tensor(7, dtype=torch.int32),
    torch.zeros(0, 4),
    torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    torch.tensor([True, False, True]),
    torch.randn(2, 3).bfloat16(),
    torch.randn(6, dtype=torch.float64)[::2],
    torch.arange(5, dtype=torch.uint8),
]


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that can be pinned, without a GPU."""
    torch_here = SimpleNamespace(
        **{**vars(torch), "empty": lambda size, dtype, pin_memory: EMPTY(size, dtype=dtype).fill_(0xAB)}
    )
    monkeypatch.setattr(pinned, "torch", torch_here)
    monkeypatch.setattr(pinned, "recorded", lambda device: "event")


def test_copies_are_contiguous_and_equal(pinning: None) -> None:
    memory = PinnedMemory()
    copies, events = memory.fill(TENSORS)
    assert events == ["event"]  # type: ignore[comparison-overlap]
    for copy, tensor in zip(copies, TENSORS, strict=True):
        assert (copy.is_contiguous() and copy.data_ptr() % ALIGNED == 0) or not copy.numel()
        assert_same(copy, tensor.contiguous())


def test_memory_is_used_again_when_it_is_written_and_not_before(pinning: None) -> None:
    memory = PinnedMemory()
    first, _ = memory.fill([torch.full((100,), 1.0)])
    second, _ = memory.fill([torch.full((100,), 2.0)])
    assert first[0].tolist() == [1.0] * 100, "its writer is not ready"
    memory.release()
    third, _ = memory.fill([torch.full((90,), 3.0)])
    assert third[0].data_ptr() == second[0].data_ptr()
    memory.release()
    larger, _ = memory.fill([torch.full((10_000,), 4.0)])
    assert larger[0].tolist() == [4.0] * 10_000


@pytest.mark.parametrize("why", ["no memory", "no GPU"])
def test_without_such_memory_copies_are_waited_for_and_it_is_said_once(
    why: str, pinning: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why == "no memory":
        monkeypatch.setattr(pinned.memory, "free", lambda: 100)
    else:

        def refuses(*arguments: Any, **more: Any) -> Any:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(pinned.torch, "empty", refuses)
    memory = PinnedMemory()
    for _ in range(2):
        copies, events = memory.fill(TENSORS)
        assert not events
        for copy, tensor in zip(copies, TENSORS, strict=True):
            assert (copy.is_contiguous() and copy.data_ptr() != tensor.data_ptr()) or not copy.numel()
            assert_same(copy, tensor.contiguous())
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "cannot be pinned for checkpoints" in said[0]


@pytest.mark.parametrize("error", [None, "failed"])
def test_a_run_that_fails_does_not_wait_for_the_copy_of_a_gpu_that_hangs(
    error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is done waits as long as the GPU needs."""
    monkeypatch.setattr(checkpoints, "HUNG_S", 0.05)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    store = SealedBoard(dist.HashStore(), b"run")
    kept = Checkpoints(tmp_path, CheckpointConfig(), Seat("worker", 0, 1, 0, 1, "cpu", store), True, 9, 9, {}, 0.0)
    packed, there, ended = Packed({"weight": torch.ones(3)}, kept.pinned), threading.Event(), list[str]()
    packed.events = [SimpleNamespace(query=there.is_set, device=None)]  # type: ignore[list-item]
    durable_folder.begin(tmp_path / "step-1")
    kept.writer.begin(lambda: ended.append(write_part(tmp_path / "step-1", "worker-0.safetensors", packed)))
    if error is None:
        threading.Timer(0.5, there.set).start()
    kept.close(failed=error is not None)
    why_not = "worker-0.safetensors cannot be written: the GPU has not come to its copy"
    assert ended == [why_not if error else ""]
