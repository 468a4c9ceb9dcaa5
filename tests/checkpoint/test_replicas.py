"""strategy=local_sgd goes on with another number of workers, from the mean of the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests import runs
from tests.checkpoint.recording import SEEN
from tests.checkpoint.test_identity import back_at
from trainer.checkpoint.tensor_tree import read
from trainer.models.lenet import LeNet

RUN = (
    "+recipe=digits_lenet",
    "scheduler=constant",
    "scheduler.warmup_epochs=0",
    "optimizer.weight_decay=0",
    "precision=fp64",
    "tracking=none",
    "execution.threads=1",
    "epochs=1",
    "limit_train_batches=14",
    "validation=false",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=100",
    "device=cpu",
    "checkpoint.background=false",
    "verbosity=quiet",
)
LOCAL = ("strategy=local_sgd", "launch=forkserver")
AT = 10
YES = "resume.allow_changes=true"


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*RUN, *command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


@pytest.mark.all
def test_where_they_average_in_each_update_it_is_one_process_before_and_after(tmp_path: Path) -> None:
    """Momentum is linear in the gradient: the mean of the replicas moves as one process on the whole batch, and only if
    the mean of their momentum is handed on, too."""
    each = ("strategy.k_steps=1", "data.global_batch_size=36")
    run(tmp_path, "strategy=single", each[1], "hydra.run.dir=alone")
    run(tmp_path, *LOCAL, *each, "launch.nproc=2", "hydra.run.dir=two")
    for workers in (1, 3):
        back_at(tmp_path / "two", AT, tmp_path / f"then{workers}")
        run(tmp_path, *LOCAL, *each, f"launch.nproc={workers}", f"hydra.run.dir=then{workers}", "resume=auto", YES)
        truth, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", f"then{workers}"))
        assert max((truth[name] - found[name]).abs().max() for name in truth) < 1e-12


@pytest.mark.all
def test_between_two_averages_all_begin_with_the_weighted_mean(tmp_path: Path) -> None:
    """33 samples are 17 and 16 for two workers; after update 10 there are two updates since the last average."""
    rarely = (
        *LOCAL,
        "strategy.k_steps=4",
        "data.global_batch_size=33",
        "model._target_=tests.checkpoint.recording.Recorded",
        "loss._target_=tests.checkpoint.recording.Loss",
    )
    run(tmp_path, *rarely, "launch.nproc=2", "hydra.run.dir=two")
    back_at(tmp_path / "two", AT, tmp_path / "three")
    (tmp_path / SEEN).mkdir()
    again = (*rarely, "launch.nproc=3", "hydra.run.dir=three", "resume=auto")
    refused = runs.trainer(*RUN, *again, cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        "the run had 2 workers, each with a replica of its own, and has 3 (not carried over: what tells the "
        "replicas of 2 workers apart: all begin with the mean"
    ) in refused.stderr
    assert not list((tmp_path / SEEN).iterdir())
    run(tmp_path, *again, YES)
    found = load_file(tmp_path / "three" / "model.safetensors")
    for name, value in by_hand(tmp_path / "three" / "checkpoints" / f"step-{AT:09d}", tmp_path / SEEN).items():
        assert (found[name] - value).abs().max() < 1e-12, name


def by_hand(checkpoint: Path, seen: Path) -> dict[str, torch.Tensor]:
    """Three replicas on what the workers have seen, from the mean of two, averaged after updates 12 and 14."""
    parts: list[Any] = [read(checkpoint / f"worker-{worker}.safetensors") for worker in range(2)]
    shares = (17 / 33, 16 / 33)
    start = {
        name: sum(share * part["model"][name] for share, part in zip(shares, parts, strict=True))
        for name in parts[0]["model"]
    }
    assert any((parts[0]["model"][name] - start[name]).abs().max() > 1e-6 for name in start), "the replicas differ"
    memories = [
        [one["momentum_buffer"] for one in part["strategy"]["updater"]["optimizer"]["state"].values()] for part in parts
    ]
    memory = [sum(share * one for share, one in zip(shares, both, strict=True)) for both in zip(*memories, strict=True)]
    models = [LeNet(image_size=8).double() for _ in range(3)]
    momentum = [[one.clone() for one in memory] for _ in range(3)]
    for model in models:
        model.load_state_dict(start)
    for update in range(AT + 1, 15):
        for rank, (model, moved) in enumerate(zip(models, momentum, strict=True)):
            images, labels = (torch.load(seen / f"{rank}.{what}.{update - AT}") for what in ("images", "labels"))
            loss = nn.functional.cross_entropy(model(images), labels)
            with torch.no_grad():
                for parameter, one, gradient in zip(
                    model.parameters(), moved, torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    one.mul_(0.9).add_(gradient)
                    parameter -= 0.05 * one
        if update in (12, 14):
            mean = {name: sum(model.state_dict()[name] for model in models) / 3 for name in start}
            for model in models:
                model.load_state_dict(mean)
    return models[0].state_dict()
