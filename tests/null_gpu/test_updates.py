"""Updates on GPUs: the host waits for none of them, and what surrounds them takes as many kernels for any model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.null_gpu import machine
from tests.null_gpu.count import UPDATES

pytestmark = pytest.mark.skipif(bool(machine.missing()), reason=machine.missing())
DIGITS = ("+recipe=digits_lenet", "data.num_workers=0", "max_steps=12", "execution.log_every=100")
IMAGES = (
    "+recipe=resnet50_random",
    "model=resnet18",
    "data.batches=12",
    "data.val_batches=2",
    "data.batch_size=8",
    *DIGITS[1:],
)
UNEVEN = ("sampler.pad=false", "sampler.drop_last=false", "data.batch_size=null", "data.global_batch_size=63")
"""Batches of 32 and 31 samples."""


def counted(library: Path, workers: int, *overrides: str) -> dict[str, Any]:
    """Waits and kernels of ``UPDATES`` updates."""
    answer = machine.run(library, "tests.null_gpu.count", {"workers": workers, "overrides": overrides}, workers)
    assert answer["phases"]["update"]["times"] == UPDATES
    return answer["phases"]["update"]  # type: ignore[no-any-return]


def waits(phase: dict[str, Any]) -> Counter[str]:
    """Waits by the file that waits."""
    found: Counter[str] = Counter()
    for _, line, times in phase["waits"]:
        found[line.partition(":")[0]] += times
    return found


@pytest.mark.parametrize(
    "typed",
    [
        ("strategy=local_sgd", "strategy.k_steps=2", *UNEVEN),
        ("strategy=collective", "precision=fp16", "strategy.clip_value=1", "ema.decay=0.9", "ema.warmup=true", *UNEVEN),
        ("strategy=collective", "strategy.comm_hook=fp16", "strategy.gradient_merge.k_steps=2", "optimizer=adamw"),
    ],
    ids=["uneven local SGD", "uneven collective in fp16", "gradients sent in fp16"],
)
def test_no_update_waits(library: Path, typed: tuple[str, ...]) -> None:
    found = counted(library, 2, *DIGITS, *typed)
    assert not found["waits"] and found["kernels"]


def test_fp16_waits_for_an_optimizer_that_is_not_fused(library: Path) -> None:
    assert waits(counted(library, 1, *DIGITS, "precision=fp16", "optimizer=rmsprop")) == {"optim/updater.py": UPDATES}


def test_skipping_updates_waits_once_for_each(library: Path) -> None:
    found = counted(library, 2, *DIGITS, "strategy=collective", "on_nonfinite=skip")
    assert waits(found) == {"worker/nonfinite.py": UPDATES}


@pytest.mark.all
def test_optimizer_clipping_and_average_take_as_many_kernels_for_any_model(library: Path) -> None:
    around = ("optim/", "worker/nonfinite.py")
    typed = ("precision=fp16", "strategy.clip_norm=1.0", "ema.decay=0.9", "optimizer=momentum")
    small, large = (
        Counter({line: n for line, n in phase["lines"].items() if line.startswith(around)})
        for phase in (counted(library, 1, *model, *typed) for model in (DIGITS, IMAGES))
    )
    more = large - small  # the average of buffers, of which only the larger model has some
    assert small and sum(more.values()) <= UPDATES and all(line.startswith("optim/averaged.py") for line in more)


def test_a_worker_waits_once_for_each_server_and_for_its_norm_whatever_the_model(library: Path) -> None:
    small, large = (machine.run(library, "tests.null_gpu.servers", depth) for depth in (2, 6))
    waited = {name: one["waits"] for name, one in small.items()}
    assert waited == {name: one["waits"] for name, one in large.items()}
    assert waited == {"clip": 1, "push": 2, "pull": 0, "look up": 0, "buffers": 1}
    assert small["push"]["kernels"] == large["push"]["kernels"] > 0


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("mean_std", [True, False])
def test_one_kernel_makes_16_bits_of_bytes(channels_last: bool, mean_std: bool, library: Path) -> None:
    question = {"channels_last": channels_last, "mean_std": mean_std}
    found = machine.run(library, "tests.null_gpu.placing", question)
    assert found["kernels"] == [["aten::addcmul", "torch.bfloat16"]] and not found["waits"]
    assert found["made"] == ["torch.bfloat16", "cuda", True]


def test_torch_computes_batch_norm_by_cudnn_in_all_types_but_bf16(library: Path) -> None:
    """Why ``precision=auto`` is fp16 for models with batch norm: see ``trainer/planning/precision.py``."""
    found = machine.run(library, "tests.null_gpu.norms", {})
    assert found == {"torch.float32": "Cudnn", "torch.float16": "Cudnn", "torch.bfloat16": "Native"}


def test_settings_hold_in_the_worker_and_nowhere_else(library: Path) -> None:
    found = machine.run(library, "tests.null_gpu.applied", {"variables": {}})
    assert found["before"] == found["after"] == {"variables": {}, "tf32": ["highest", False, True]}
    segments = "expandable_segments:True"
    variables = {"PYTORCH_CUDA_ALLOC_CONF": segments, "TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_DEBUG": "WARN"}
    assert found["within"] == {"variables": variables, "tf32": ["high", True, True]}
    assert found["allocator"]["expandable_segments"] is True
    assert found["none"] == {"variables": {}, "tf32": ["highest", False, False]}


def test_the_users_variables_stay_as_they_are(library: Path) -> None:
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "NCCL_DEBUG": "INFO", "NVIDIA_TF32_OVERRIDE": "0"}
    found = machine.run(library, "tests.null_gpu.applied", {"variables": own})
    del own["NVIDIA_TF32_OVERRIDE"]
    assert found["within"] == {"variables": own | {"TORCH_NCCL_HIGH_PRIORITY": "1"}, "tf32": ["highest", False, True]}
    assert found["allocator"]["expandable_segments"] is False
    assert found["after"]["variables"] == own
