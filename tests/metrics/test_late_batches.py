"""Batches that come late from a GPU give the numbers of those that are there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from trainer.host import transfers
from trainer.metrics import binary, label_rankings
from trainer.metrics.binary import BinaryExam
from trainer.metrics.label_rankings import RankingsShown


class Late:
    """Tensors that are there when four others were asked for after them."""

    made = 0

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        Late.made += 1
        self.tensors, self.number = list(tensors), Late.made

    @property
    def there(self) -> bool:
        return Late.made >= self.number + 4

    def read(self) -> list[torch.Tensor]:
        return self.tensors


def binary_exam() -> torch.Tensor:
    draw, exam = torch.Generator().manual_seed(1), BinaryExam(200)
    for number in range(40):
        logits = torch.randn(17, generator=draw)
        labels = (logits + torch.randn(17, generator=draw) > 0).float()
        exam.add(torch.tensor(0.5), logits, labels, 17, np.arange(17) + number)
    return exam.sums()


def rankings() -> torch.Tensor:
    draw, shown = torch.Generator().manual_seed(2), RankingsShown(3, 640, 1, 2)
    for number in range(40):
        outputs = torch.randn(16, 3, generator=draw, dtype=torch.float64)
        shown.add(outputs, (outputs > 0.3).double(), np.arange(16) + number)
    return shown.vector()


@pytest.mark.parametrize("measure", [binary_exam, rankings])
def test_late_batches_are_the_same(measure: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "CHUNK", 50)  # 13 chunks, which are joined one after another
    monkeypatch.setattr(label_rankings, "CHUNK", 50)
    at_once = measure()
    monkeypatch.setattr(transfers, "Arriving", Late)
    assert torch.equal(measure(), at_once) and at_once.abs().sum() > 0


def test_batches_are_taken_in_order_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "Arriving", Late)
    seen: list[tuple[int, int]] = []
    queue = transfers.Queue(lambda tensor, number: seen.append((int(tensor), number)))
    for number in range(8):
        queue.put([torch.tensor(number)], number)
        assert len(seen) == max(0, number - 3)
    queue.finish()
    assert seen == [(number, number) for number in range(8)]
