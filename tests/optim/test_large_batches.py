"""optimizer=lars, lamb and lion against the formulas of their papers in float64, and divided among workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import runs
from trainer.cli.compose import compose, hydra_app
from trainer.config.instantiate import call_target
from trainer.job.memory_rows import slots
from trainer.optim.groups import Rate, optimizer_of

LR, DECAY = 0.1, 0.01
State = dict[str, torch.Tensor]


def lars(w: torch.Tensor, g: torch.Tensor, state: State, step: int) -> torch.Tensor:
    """You et al., 2017, algorithm 1: the local rate is coefficient * |w| / (|g| + decay * |w|)."""
    local = 0.001 * w.norm() / (g.norm() + DECAY * w.norm() + 1e-8)
    state["m"] = 0.9 * state["m"] + local * (g + DECAY * w)
    return w - LR * state["m"]


def lamb(w: torch.Tensor, g: torch.Tensor, state: State, step: int) -> torch.Tensor:
    """You et al., 2020, algorithm 2: Adam's direction and the decay, scaled to the norm of the weights."""
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["v"] = 0.999 * state["v"] + 0.001 * g * g
    direction = (state["m"] / (1 - 0.9**step)) / ((state["v"] / (1 - 0.999**step)).sqrt() + 1e-6) + DECAY * w
    return w - LR * w.norm() / direction.norm() * direction


def lion(w: torch.Tensor, g: torch.Tensor, state: State, step: int) -> torch.Tensor:
    """Chen et al., 2023, algorithm 2: the sign of a mean, and a decay apart from it."""
    direction = (0.9 * state["m"] + 0.1 * g).sign()
    state["m"] = 0.99 * state["m"] + 0.01 * g
    return w - LR * (direction + DECAY * w)


RULES: dict[str, Callable[[torch.Tensor, torch.Tensor, State, int], torch.Tensor]] = {
    "lars": lars,
    "lamb": lamb,
    "lion": lion,
}


def node_of(name: str) -> dict[str, Any]:
    with hydra_app() as app:
        config = compose(
            app, ["+recipe=digits_lenet", f"optimizer={name}", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}"]
        )
        return dict(config.optimizer)


def made(name: str, parameters: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = call_target(node_of(name), "optimizer", parameters)
    return found


@pytest.mark.parametrize("name", RULES)
def test_ten_updates_are_those_of_the_paper(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    live, w = start.clone().requires_grad_(), start.clone()
    optimizer, state = made(name, [live]), {"m": torch.zeros_like(w), "v": torch.zeros_like(w)}
    for step in range(1, 11):
        gradient = torch.randn(5, 7, dtype=torch.float64, generator=generator)
        live.grad = gradient.clone()
        optimizer.step()
        w = RULES[name](w, gradient, state, step)
    torch.testing.assert_close(live.detach(), w, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb", "lion", "muon"]
)
def test_the_plan_counts_what_an_optimizer_keeps(name: str) -> None:
    """So many tensors like the parameter are in a checkpoint for each of them; of muon, for a hidden matrix."""
    node = node_of(name)
    live = torch.ones(5, 7, requires_grad=True)
    optimizer = optimizer_of(node, [(Rate(matrix=name == "muon"), [live])])
    live.grad = torch.ones(5, 7)
    optimizer.step()
    [state] = optimizer.state_dict()["state"].values() or [{}]
    kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == live.shape]
    assert slots(node) == len(kept)


@pytest.mark.all
@pytest.mark.parametrize("name", RULES)
def test_shards_take_the_steps_of_whole_parameters(name: str, warm: None, tmp_path: Path) -> None:
    """A norm is that of the whole parameter, not of a worker's shard."""
    both = (
        *("+recipe=digits_lenet", f"optimizer={name}", "precision=fp64", "data.global_batch_size=32", "epochs=1"),
        *("limit_train_batches=5", "validation=false", "tracking=none", "execution.threads=1", "verbosity=quiet"),
    )
    for strategy in ("single", "sharded"):
        more = ("launch=forkserver", "launch.nproc=2") if strategy == "sharded" else ()
        ended = runs.trainer(*both, *more, f"strategy={strategy}", f"hydra.run.dir={strategy}", cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "sharded"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-10)
