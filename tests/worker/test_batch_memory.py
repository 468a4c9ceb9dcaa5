"""What the plan says that a batch takes is what torch's allocator gives out for it."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.composed import ready
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.job.checkpoint_rows import kept_rows
from trainer.models.blocks import chosen
from trainer.models.recomputed import recompute
from trainer.worker import batch_memory
from trainer.worker.model import autocast

IMAGES = ("+recipe=resnet50_random", "data.image_size=224", "data.batch_size=8", "tracking=none", "strategy=single")
RESNET = (*IMAGES, "model=resnet18")
VIT = (*IMAGES, "model=timm", "model.model_name=vit_tiny_patch16_224")
CASES = {
    "LeNet": (("+recipe=digits_lenet", "data.batch_size=64", "tracking=none", "strategy=single"), 0.15),
    "ResNet": (RESNET, 0.1),
    "ResNet, recomputed": ((*RESNET, "recompute=auto"), 0.1),
    "ViT": (VIT, 0.1),
    "ViT, recomputed": ((*VIT, "recompute=auto"), 0.1),
}
"""Runs, and by what share of the truth the prediction may be less. A kernel for a convolution takes memory inside: in
fp32 oneDNN pads the 20 channels of LeNet to 32."""


def allocated(config: RunConfig, facts: Facts, precision: str, samples: int) -> int:
    """The most bytes of the allocator in a forward and a backward, which frees gradients of parameters at once."""
    model: nn.Module = call_target(config.model, "model")
    model.train().to(torch.float64 if precision == "fp64" else torch.float32)
    if config.recompute != "none":
        recompute(chosen(model, config.recompute, "recompute"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        inputs = torch.zeros((samples, *facts.shape), dtype=next(model.parameters()).dtype)
        with autocast(precision, torch.device("cpu"))():
            outputs = model(inputs)
        outputs.sum().backward()
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    return max(itertools.accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in ("LeNet", "ResNet", "ViT")),
        *(pytest.param(name, "fp32", marks=pytest.mark.all) for name in ("ResNet, recomputed", "ViT, recomputed")),
        *(pytest.param(name, "bf16", marks=pytest.mark.all) for name in CASES if name != "LeNet"),
        pytest.param("ViT", "fp64", marks=pytest.mark.all),
    ],
)
def test_a_batch_takes_what_is_predicted(name: str, precision: str) -> None:
    typed, less = CASES[name]
    job = ready(*typed, f"precision={precision}")
    config, facts, samples = job.checked.config, job.checked.facts, job.plan.batches.size
    predicted = batch_memory.of_a_batch(config, facts, precision, "cpu", samples)
    truth = allocated(config, facts, precision, samples)
    assert (1 - less) * truth < predicted < 1.1 * truth


@pytest.mark.all
def test_a_larger_batch_and_more_that_is_kept_take_more() -> None:
    sizes = []
    for typed, samples in ((VIT, 2), (VIT, 4), ((*VIT, "recompute=auto"), 4)):
        job = ready(*typed, "precision=fp32")
        sizes.append(batch_memory.of_a_batch(job.checked.config, job.checked.facts, "fp32", "cpu", samples))
    assert 1.9 * sizes[0] < sizes[1] < 2.1 * sizes[0] and sizes[2] < 0.5 * sizes[1]


class Reading(nn.Module):
    """Decides by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.flatten(1))
        return -found if found.sum().item() > 0 else found


def test_of_a_model_that_reads_values_nothing_is_said() -> None:
    typed = ("+recipe=digits_lenet", f"model._target_={__name__}.Reading", "~model.image_size", "~model.in_channels")
    job = ready(*typed, "~model.num_classes", "tracking=none", "strategy=single")
    assert batch_memory.of_a_batch(job.checked.config, job.checked.facts, "fp32", "cpu", 4) == 0


def test_the_plan_adds_up_what_a_worker_holds() -> None:
    typed = ("+recipe=digits_lenet", "optimizer=adam", "precision=fp32", "tracking=none", "launch.nproc=2", "plan=true")
    row = dict(kept_rows(ready(*typed, "verbosity=debug")))["memory"]
    found = re.fullmatch(r"about ([\d.]+) kB on each worker: (.*) for a batch of \d+ samples", row)
    assert found is not None, row
    numbers = 4 * 11_350 / 1000
    *parts, batch = found[2].split(", ")
    assert parts == [
        f"{numbers:.1f} kB of parameters",
        f"{numbers:.1f} kB of gradients",
        f"{2 * numbers:.1f} kB of optimizer state",
    ]
    assert float(found[1]) == pytest.approx(4 * numbers + float(batch.removesuffix(" kB")), abs=0.2)
    assert dict(kept_rows(ready(*typed)))["memory"] == f"about {found[1]} kB on each worker"
    assert "memory" not in dict(kept_rows(ready(*typed[:-1])))
