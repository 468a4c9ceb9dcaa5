"""recompute: the numbers of a run stay the same to the bit, and activations are not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from tests import runs
from trainer.models.blocks import chosen
from trainer.models.recomputed import recompute

RUN = (
    "+recipe=resnet50_random",
    "model=resnet18",
    "data.image_size=32",
    "data.batch_size=4",
    "data.batches=2",
    "data.val_batches=1",
    "precision=fp64",
    "epochs=1",
    "tracking=none",
    "execution.threads=1",
    "verbosity=quiet",
)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Gradients of a forward and backward, the buffers after it, and the bytes that were kept between the two."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs).square().sum()
    held = sum(kept.values())
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], [*model.buffers()], held


@pytest.mark.parametrize("kind", ["batch norm", "dropout"])
def test_gradients_and_statistics_are_the_same_to_the_bit_and_less_is_kept(kind: str) -> None:
    make: Any = torchvision.models.resnet18 if kind == "batch norm" else Attentive
    inputs = torch.randn(*((2, 3, 64, 64) if kind == "batch norm" else (2, 30, 8)), dtype=torch.float64)
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = make().double().train()
        if again:
            recompute(chosen(model, "auto", "recompute"))
        found.append(gradients(model, inputs))
    (plain, buffers, held), (same, after, less) = found
    assert len(plain) == len(same) and all(map(torch.equal, plain, same))
    assert all(map(torch.equal, buffers, after)), "a second forward counts no batch"
    assert less < 0.75 * held


@pytest.mark.all
@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("launch.nproc=2", "strategy.sync_batch_norm=true"), marks=pytest.mark.all),
        pytest.param(("launch.nproc=2", "strategy=sharded"), marks=pytest.mark.all),
    ],
)
def test_a_run_ends_with_the_same_weights(more: tuple[str, ...], warm: None, tmp_path: Path) -> None:
    launch = ("launch=forkserver",) if more else ()
    for name in ("none", "auto"):
        ended = runs.trainer(*RUN, *launch, *more, f"recompute={name}", f"hydra.run.dir={name}", cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
    plain, auto = (load_file(tmp_path / name / "model.safetensors") for name in ("none", "auto"))
    assert plain.keys() == auto.keys()
    assert all(torch.equal(plain[key], auto[key]) for key in plain)
