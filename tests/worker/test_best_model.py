"""The best model's file is the best one's, also where a worker was stopped while it wrote it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.notes import Notes
from trainer.checkpoint.pinned import PinnedMemory
from trainer.host.notes_board import NoNote
from trainer.worker import best_model


def model_of(value: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


class Away(Notes):
    def check(self, keys: list[str]) -> bool:
        raise NoNote("the store did not answer")


@pytest.mark.parametrize(
    ("board", "lost", "kept"), [(Notes, "", 2.0), (Notes, "nothing was heard of it for 10 s", 1.0), (Away, "", 2.0)]
)
def test_worker_that_was_lost_while_it_wrote_replaces_nothing(
    board: Any, lost: str, kept: float, tmp_path: Path
) -> None:
    seat: Any = SimpleNamespace(rank=0, store=board())
    strategy: Any = SimpleNamespace()
    (tmp_path / "checkpoints").mkdir()
    best_model.save_best(model_of(1.0), strategy, SimpleNamespace(rank=1, store=Notes()), tmp_path, PinnedMemory())  # type: ignore[arg-type]
    seat.store.set("fenced/worker/0", lost)
    best_model.save_best(model_of(2.0), strategy, seat, tmp_path, PinnedMemory())
    assert torch.equal(load_file(tmp_path / "checkpoints" / "best.safetensors")["weight"], torch.tensor([[kept]]))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["best.safetensors"]
