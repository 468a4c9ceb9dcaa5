"""Memory that is not enough is one sentence, and what it proposes makes the same update."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from trainer.errors import RunFailed

DIGITS = (
    "+recipe=digits_lenet",
    "tracking=none",
    "device=cpu",
    "execution.threads=1",
    "max_steps=4",
    "execution.val_every=0",
    "verbosity=quiet",
    "~model.in_channels",
    "~model.image_size",
)
ERRORS: dict[str, Exception] = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "python": MemoryError(),
    "another": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
}


class Greedy(nn.Module):
    """Has memory for so many samples at once."""

    def __init__(self, num_classes: int, most: int, kind: str = "cuda") -> None:
        super().__init__()
        self.linear, self.most, self.kind = nn.Linear(64, num_classes), most, kind

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) > self.most:
            raise ERRORS[self.kind]
        return self.linear(images.mean(1).flatten(1)[:, :64])


def run(folder: str, *more: str) -> Any:
    return trainer.run(
        [
            *DIGITS,
            "model._target_=tests.worker.test_out_of_memory.Greedy",
            "+model.most=16",
            f"hydra.run.dir={folder}",
            *more,
        ]
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda", "python"])
def test_the_proposal_is_taken_and_trains(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailed) as caught:
        run("one", "data.batch_size=32", f"+model.kind={kind}")
    said = str(caught.value)
    assert "cpu is out of memory after 0 updates, with batches of 32 samples per worker" in said
    proposal = said.partition("needs less: ")[2].partition(". So")[0]
    assert proposal == "data.global_batch_size=32 strategy.gradient_merge.k_steps=2"
    assert run("two", *shlex.split(proposal), f"+model.kind={kind}").status == "done"
    assert json.loads(Path("two/result.json").read_text())["samples"] == 4 * 32


def test_a_batch_that_cannot_be_halved_has_another_proposal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RunFailed, match=r"17 samples per worker\. A smaller data\.batch_size, precision=bf16 or a smaller model"
    ):
        run("one", "data.batch_size=17")


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="mat1 and mat2") as caught:
        run("one", "data.batch_size=32", "+model.kind=another")
    assert "out of memory" not in str(caught.value)
