"""optimizer=muon: its authors' formulas in float64, which parameters are matrices of hidden layers, and workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models import resnet18

from tests import runs
from tests.optim.test_large_batches import made
from trainer.models.lenet import LeNet
from trainer.models.wide_and_deep import WideAndDeep
from trainer.optim.groups import MUON as TARGET
from trainer.optim.groups import Rate, grouped, optimizer_of, rates
from trainer.optim.hidden_matrices import hidden_matrices

LR, DECAY = 0.1, 0.01
SHAPES = ((5, 7), (7, 5), (6, 2, 3, 3))
"""Wide, tall, and a kernel of a convolution."""


def newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """Jordan et al., 2024: an odd polynomial of degree 5, five times, here of the singular values themselves."""
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / (g.norm() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_ten_updates_of_a_matrix_are_those_of_its_authors(shape: tuple[int, ...], scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64, generator=generator)
    live, w, m = start.clone().requires_grad_(), start.flatten(1), torch.zeros_like(start.flatten(1))
    node = {"_target_": TARGET, "lr": LR, "weight_decay": DECAY, "scale": scale}
    optimizer = optimizer_of(node, [(Rate(matrix=True), [live])])
    rows, columns = w.shape
    factor = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    for _ in range(10):
        gradient = torch.randn(shape, dtype=torch.float64, generator=generator)
        live.grad = gradient.clone()
        optimizer.step()
        g = gradient.flatten(1)
        m = 0.95 * m + g
        w = (1 - LR * DECAY) * w - LR * factor * newton_schulz(g + 0.95 * m)
    torch.testing.assert_close(live.detach().flatten(1), w, rtol=0, atol=1e-10)


def test_everything_else_takes_the_steps_of_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.ones(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    muon = made("muon", [ours])
    adamw = torch.optim.AdamW([theirs], lr=LR, weight_decay=DECAY)
    for _ in range(10):
        ours.grad = torch.randn(5, 7, dtype=torch.float64, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step()
        adamw.step()
    assert torch.equal(ours, theirs)


def test_a_matrix_goes_where_torchs_muon_goes_but_for_its_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.zeros(64, 32, requires_grad=True) for _ in range(2))
    node = {"_target_": TARGET, "lr": LR, "weight_decay": DECAY}
    both = (
        optimizer_of(node, [(Rate(matrix=True), [ours])]),
        torch.optim.Muon([theirs], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(5):
        ours.grad = torch.randn(64, 32, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * ours.norm()


MODELS = {
    "lenet": (lambda: LeNet(num_classes=10, image_size=28), {"features.3.weight"}),
    "wide_and_deep": (lambda: WideAndDeep(100), {"deep.0.weight", "deep.2.weight", "deep.4.weight"}),
    "one layer": (lambda: nn.Linear(3, 3), set()),
    "one output": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), {"1.weight"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_those_between_the_first_and_the_last_layer(name: str) -> None:
    model, expected = MODELS[name]
    assert hidden_matrices(model()) == expected


def test_no_position_embedding_norm_or_token_is_a_matrix() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    linear = {f"{name}.weight" for name, m in vit.named_modules() if isinstance(m, nn.Linear)}
    assert hidden_matrices(vit) == linear - {"head.weight"}
    resnet = resnet18()
    kernels = {f"{name}.weight" for name, m in resnet.named_modules() if isinstance(m, nn.Conv2d)}
    assert hidden_matrices(resnet) == kernels - {"conv1.weight"}


def test_rates_of_single_parameters_hold_for_matrices_too() -> None:
    model = LeNet(num_classes=10, image_size=28)
    node = {"_target_": TARGET, "lr": LR, "weight_decay": DECAY, "lr_factors": {"features.3": 0.5}}
    found = rates(model, node)
    optimizer = optimizer_of(node, grouped(model.named_parameters(), found))
    [matrices] = [group for group in optimizer.param_groups if group.get("matrix")]
    assert (matrices["lr"], matrices["weight_decay"], len(matrices["params"])) == (LR / 2, DECAY, 1)


@pytest.mark.all
def test_any_number_of_workers_equals_one(warm: None, tmp_path: Path) -> None:
    both = (
        *("+recipe=digits_lenet", "optimizer=muon", "precision=fp64", "data.global_batch_size=32", "epochs=1"),
        *("limit_train_batches=5", "validation=false", "tracking=none", "execution.threads=1", "verbosity=quiet"),
    )
    for strategy, workers in (("single", 1), ("collective", 2)):
        more = ("launch=forkserver", f"launch.nproc={workers}", f"strategy={strategy}", f"hydra.run.dir={strategy}")
        ended = runs.trainer(*both, *more, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "collective"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-10)
