"""Memory that is not enough is one sentence, and what it proposes makes the same update."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.composed import ready
from tests.pictures import image_folder
from trainer.errors import RunFailed
from trainer.host.memory import GIB
from trainer.run_folder.report import Phase, Report
from trainer.worker.out_of_memory import memory_named

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
    """Has memory for so many samples at once, in training or in evaluations."""

    def __init__(self, num_classes: int, most: int, kind: str = "cuda", evaluated: bool = False) -> None:
        super().__init__()
        self.linear, self.most, self.kind, self.evaluated = nn.Linear(64, num_classes), most, kind, evaluated

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training is not self.evaluated and len(images) > self.most:
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
    with pytest.raises(RunFailed, match=r"17 samples per worker\. A smaller data\.batch_size or a smaller model needs"):
        run("two", "data.batch_size=17", "precision=bf16")  # no fewer bits are to be had


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="mat1 and mat2") as caught:
        run("one", "data.batch_size=32", "+model.kind=another")
    assert "out of memory" not in str(caught.value)


def full(*arguments: Any, **keywords: Any) -> Any:
    """Stands in for anything that asks a GPU for memory."""
    raise ERRORS["cuda"]


BEFORE = "cpu is out of memory before the first batch. A smaller model needs less (torch: CUDA out of memory."
MOMENTS: dict[str, tuple[str, str]] = {
    "the first call of CUDA": ("trainer.worker.train.settings", BEFORE),
    "the model": ("trainer.worker.build.prepared", BEFORE),
    "the optimizer": ("trainer.worker.model.Updaters.__call__", BEFORE),
    "a checkpoint that is read": ("trainer.worker.resuming.load_state", BEFORE),
    "a checkpoint that is made": ("trainer.worker.checkpoints.Packed", "cpu is out of memory after 4 updates, with"),
    "the model at the end": (
        "trainer.worker.train.save_by_first",
        "cpu is out of memory after 4 updates, with batches of 16",
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_memory_is_named_at_every_moment_of_a_training(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, sentence = MOMENTS[moment]
    more: tuple[str, ...] = ()
    if moment == "a checkpoint that is read":
        run("one", "data.batch_size=16", "checkpoint.every_steps=2")
        more = ("resume=one", "max_steps=6", "resume.allow_changes=true")
    monkeypatch.setattr(place, full)
    with pytest.raises(RunFailed) as caught:
        run("one", "data.batch_size=16", "max_steps=4", *more)
    assert str(caught.value).startswith(sentence)


def test_smaller_batches_are_proposed_to_a_validation_and_an_evaluation_and_measure_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ("data.batch_size=16", "data.val_batch_size=32", "execution.val_every=1", "+model.evaluated=true")
    with pytest.raises(RunFailed) as caught:
        run("one", *typed)
    where = "with batches of 32 samples per worker. Smaller batches give the same metrics: data.val_batch_size=16 ("
    assert str(caught.value).startswith(f"cpu is out of memory in an evaluation after 4 updates, {where}")
    found = run("two", *typed, "data.val_batch_size=16").metrics
    weights = ("mode=eval", "weights=two", "data.batch_size=16")
    with pytest.raises(RunFailed) as caught:
        run("three", *weights, "data.val_batch_size=32", "+model.evaluated=true")
    assert str(caught.value).startswith(f"cpu is out of memory in an evaluation, {where}")
    again = run("four", *weights, "data.val_batch_size=16", "+model.evaluated=true").metrics
    assert again["val/loss"] == pytest.approx(found["val/loss"])


class GreedyPictures(Greedy):
    """The same for pictures of 32 x 32 pixels."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.mean(1, keepdim=True)[..., ::4, ::4])


def test_smaller_batches_are_proposed_to_a_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = image_folder(tmp_path / "images")
    model = ["model=lenet", f"model._target_={__name__}.GreedyPictures", "~model.in_channels", "~model.image_size"]
    data = ["data=imagefolder", f"data.root={images}", "data.image_size=32", "device=cpu", "tracking=none"]
    shared = [*data, *model, "+model.most=2", "+model.evaluated=true", "data.num_workers=0", "test=false"]
    trainer.run([*shared, "max_steps=1", "data.batch_size=4", "data.val_batch_size=2", "hydra.run.dir=run"])
    predict = [*shared, "mode=predict", f"predict.input={images}/val", "weights=run"]
    with pytest.raises(RunFailed) as caught:
        trainer.run([*predict, "data.batch_size=4", "hydra.run.dir=one"])
    assert str(caught.value).startswith(
        "cpu is out of memory after 0 batches, with batches of 4 samples per worker. "
        "Smaller batches give the same rows: data.batch_size=2 ("
    )
    assert trainer.run([*predict, "data.batch_size=2", "hydra.run.dir=two"]).status == "done"
    monkeypatch.setattr("trainer.worker.predict.fit.load", full)
    with pytest.raises(RunFailed, match=r"cpu is out of memory before the first batch\. Another GPU or device=cpu"):
        trainer.run([*predict, "data.batch_size=2", "hydra.run.dir=three"])


def sentence(tmp_path: Path, error: Exception, phase: Phase) -> str:
    """Of an error on a second GPU, of 80 GiB, of which this process has used 20 and another one has 50."""
    plan = ready(*DIGITS[:-2], "data.batch_size=32", run_dir=str(tmp_path)).assignment.plan
    report = Report(None, 4)
    report.phase = phase
    with pytest.raises(RunFailed) as caught, memory_named(plan, "cuda:1", report):
        raise error
    return str(caught.value)


def test_the_peak_and_the_memory_of_others_are_those_of_the_workers_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_second(value: Any) -> Callable[[str], Any]:
        return lambda device: {"cuda:1": value}[device]

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of_second(20 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of_second(25 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", of_second((5 * GIB, 80 * GIB)))
    assert sentence(tmp_path, ERRORS["cuda"], Phase.TRAINING).startswith(
        "cuda:1 is out of memory after 0 updates, with batches of 32 samples per worker; "
        "the peak of its tensors was 20.0 of 80.0 GiB, and 50.0 GiB are held by others. The same update"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    assert "; other processes may hold its memory (nvidia-smi). A smaller" in sentence(
        tmp_path, RuntimeError("CUDA error: out of memory"), Phase.START
    )


@pytest.mark.parametrize("kind", ["cpu", "python"])
def test_a_worker_of_a_gpu_does_not_take_the_hosts_memory_for_the_gpus(kind: str, tmp_path: Path) -> None:
    said = sentence(tmp_path, ERRORS[kind], Phase.TRAINING)
    assert said.startswith(
        "the host is out of memory after 0 updates, with batches of 32 samples per worker. A smaller"
    )
    assert "data.num_workers" in said and "cuda" not in said
