"""optimizer=schedule_free and schedule_free_sgd: the paper's three sequences in float64, and the weights that count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import runs
from tests.optim.test_large_batches import made, node_of
from trainer.checkpoint import store, tensor_tree
from trainer.job.memory_rows import saved_slots
from trainer.optim.updater import Updater

LR, DECAY = 0.1, 0.01
NAMES = ("schedule_free", "schedule_free_sgd")
RUN = (
    *("+recipe=digits_lenet", "precision=fp64", "data.global_batch_size=32", "limit_train_batches=5", "epochs=2"),
    *("scheduler=constant", "scheduler.warmup_steps=3", "tracking=none", "execution.threads=1", "verbosity=quiet"),
)
ALL = ("limit_val_batches=null", "execution.val_every_steps=2")
Optimizer = Any


class Paper:
    """Defazio et al., 2024: algorithm 1 (AdamW) and equations 1 to 3 (SGD), with all three sequences kept."""

    def __init__(self, name: str, start: torch.Tensor) -> None:
        self.adam = name == "schedule_free"
        self.x, self.z, self.v, self.squares, self.t = start.clone(), start.clone(), torch.zeros_like(start), 0.0, 0

    @property
    def y(self) -> torch.Tensor:
        return 0.1 * self.z + 0.9 * self.x

    def step(self, g: torch.Tensor, lr: float) -> None:
        self.t += 1
        y, rate = self.y, lr
        if self.adam:
            self.v = 0.999 * self.v + 0.001 * g * g
            rate = lr * (1 - 0.999**self.t) ** 0.5
            g = g / (self.v.sqrt() + 1e-8)
        self.z = self.z - rate * (g + DECAY * y)
        self.squares += rate**2
        self.x = (1 - rate**2 / self.squares) * self.x + rate**2 / self.squares * self.z


@pytest.mark.parametrize("name", NAMES)
def test_ten_updates_are_those_of_the_paper(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    live, paper = start.clone().requires_grad_(), Paper(name, start)
    optimizer: Optimizer = made(name, [live])
    for step in range(10):
        lr = LR * min(1, (step + 1) / 4)
        for group in optimizer.param_groups:
            group["lr"] = lr
        gradient = torch.randn(5, 7, dtype=torch.float64, generator=generator)
        live.grad = gradient.clone()
        optimizer.step()
        paper.step(gradient, lr)
        torch.testing.assert_close(live.detach(), paper.y, rtol=0, atol=1e-10)
    optimizer.eval()
    torch.testing.assert_close(live.detach(), paper.x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_count_come_and_go_without_a_rounding(name: str) -> None:
    live = torch.randn(5, 7, requires_grad=True)
    updater = Updater(made(name, [live]), lambda step: 1.0)
    for _ in range(3):
        live.grad = torch.randn(5, 7)
        updater.step()
    trained = live.detach().clone()
    with updater.evaluated():
        assert not torch.equal(live, trained)
        counting = live.detach().clone()
        with updater.evaluated():  # a checkpoint within a validation
            assert torch.equal(live, counting)
        assert torch.equal(live, counting)
        [state] = updater.optimizer.state_dict()["state"].values()
        kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == live.shape]
        assert saved_slots(node_of(name)) == len(kept)
    assert torch.equal(live, trained)


Ended = Callable[..., Path]


@pytest.fixture(scope="module")
def ended(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The folder of a run of two epochs."""

    def run(folder: str, *overrides: str) -> Path:
        cwd = tmp_path_factory.mktemp("schedule_free")
        done = runs.trainer(*RUN, *overrides, f"hydra.run.dir={folder}", cwd=cwd)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        return cwd / folder

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_validations_and_checkpoints_leave_the_training_as_it_is_and_have_what_counts(name: str, ended: Ended) -> None:
    lone = ended("lone", f"optimizer={name}", "validation=false", "checkpoint=none")
    often = ended("often", f"optimizer={name}", "execution.val_every_steps=1", "checkpoint.every_steps=1")
    for key, value in weights(lone).items():
        assert torch.equal(weights(often)[key], value)
    part = tensor_tree.read(store.folder_of(often / "checkpoints", 10) / store.part_of(0))
    for key, value in weights(often).items():
        assert torch.equal(part["model"][key], value), "what counts is in a checkpoint, too"
    [trained, *_] = [state["y"] for state in part["strategy"]["updater"]["optimizer"]["state"].values()]
    assert not any(torch.equal(trained, value) for value in weights(often).values() if value.shape == trained.shape)


@pytest.mark.all
@pytest.mark.parametrize(
    "workers",
    [
        ("strategy=collective", "launch.nproc=2"),
        pytest.param(("strategy=sharded", "launch.nproc=2"), marks=pytest.mark.all),
    ],
    ids=lambda one: one[0],
)
def test_any_number_of_workers_equals_one(workers: tuple[str, ...], ended: Ended) -> None:
    one = ended("one", "optimizer=schedule_free", "strategy=single")
    two = ended("two", "optimizer=schedule_free", "launch=forkserver", *workers)
    for key, value in weights(one).items():
        torch.testing.assert_close(weights(two)[key], value, rtol=0, atol=1e-10)
