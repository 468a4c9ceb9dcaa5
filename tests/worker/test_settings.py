"""A run in a process that does several has the settings of its own config, and leaves the process as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as compiled
from torch._dynamo.backends.distributed import DDPOptimizer

import trainer
from tests.composed import ready
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.notes_board import SealedBoard
from trainer.models.lenet import LeNet
from trainer.planning.validate import check_repeatable
from trainer.strategies.seat import Seat
from trainer.worker.settings import settings

DIGITS = ("+recipe=digits_lenet", "tracking=none", "device=cpu", "execution.threads=2")
Calls = list[tuple[str, Any, str | None]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """What is asked of CUDA: the call, its GPU, and the rule for matrix products at this moment."""
    made: Calls = []
    for name in ("set_device", "reset_peak_memory_stats"):
        note = lambda gpu, name=name: made.append((name, str(gpu), os.environ.get(hardware.CUBLAS)))  # noqa: E731
        monkeypatch.setattr(torch.cuda, name, note)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv(hardware.CUBLAS, raising=False)
    yield made


def run_on(device: str, folder: Path, *typed: str) -> Any:
    """The settings of a run whose worker is the second of its host."""
    assignment = ready(*DIGITS, *typed, run_dir=str(folder)).assignment
    seat = Seat("worker", 1, 2, 1, 2, device, SealedBoard(dist.HashStore(), b"x" * 32))
    return settings(assignment.config, assignment.plan, seat)


def switches() -> tuple[Any, ...]:
    return torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark


def test_a_deterministic_run_after_a_plain_one_has_the_settings_of_one_alone(tmp_path: Path, calls: Calls) -> None:
    before = switches()
    found = []
    for typed in ((), ("execution=deterministic",), ()):
        with run_on("cuda:1", tmp_path, *typed):
            found.append(switches())
        assert switches() == before
    assert found == [(2, 0, True), (2, 2, False), (2, 0, True)]
    # torch reads the rule once: it is there before the first call, of the plain run too
    assert calls == [(name, "cuda:1", ":4096:8") for name in ("set_device", "reset_peak_memory_stats")] * 3


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_the_caller_had_set_comes_back_also_after_a_failure(
    mode: int, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gpu: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        outside = switches()
        with run_on("cuda:1", tmp_path, "execution=deterministic"):
            assert switches()[1] == 2
        assert switches() == outside
        monkeypatch.setattr(torch.cuda, "set_device", full)
        with pytest.raises(torch.OutOfMemoryError), run_on("cuda:1", tmp_path):
            pass
        assert switches() == outside
    finally:
        torch.set_deterministic_debug_mode(before)


def test_matrix_products_that_cannot_be_repeated_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ready(*DIGITS, "execution=deterministic", run_dir=str(tmp_path)).assignment.config
    plain = replace(config, execution=replace(config.execution, deterministic=False))
    for rule, refused in ((None, False), (":4096:8", False), (":16:8", False), (":4096:2:16:8", True), ("", True)):
        monkeypatch.delenv(hardware.CUBLAS, raising=False)
        if rule is not None:
            monkeypatch.setenv(hardware.CUBLAS, rule)
        check_repeatable(config, "cpu")
        check_repeatable(plain, "cuda")
        if not refused:
            check_repeatable(config, "cuda")
            continue
        with pytest.raises(UserError, match=f"{hardware.CUBLAS}={rule} .*instead: {hardware.CUBLAS}=:4096:8 before"):
            check_repeatable(config, "cuda")


@pytest.mark.all
def test_a_run_does_not_count_what_runs_before_it_have_compiled(tmp_path: Path) -> None:
    """torch compiles a function for 8 shapes, and then runs it as it is, without a word."""
    typed = ("+recipe=digits_lenet", "tracking=none", "compile=true", "execution.compile_backend=eager", "max_steps=1")
    counts = []
    for size in (4, 5, 6, 4):
        folder = tmp_path / str(len(counts))
        trainer.run(
            [*typed, "test=false", "execution.val_every=0", f"data.batch_size={size}", f"hydra.run.dir={folder}"]
        )
        counts.append(len(compiled(LeNet.forward.__code__)))
    assert counts[0] == counts[-1] > 0 and len(set(counts)) == 1


def test_buckets_that_are_refused_with_compile_are_those_that_torch_cannot_use() -> None:
    DDPOptimizer(2**20, None)  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError, match="First bucket should be smaller"):
        DDPOptimizer(2**20 - 1, None)  # type: ignore[no-untyped-call]
