"""The plan's gradient buckets are those that torch's own DDP makes: one worker trains, a hook sees what is
exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.schema import CollectiveStrategy
from trainer.job.plan_table import exchanged
from trainer.optim.updater import Updater
from trainer.planning.auto import Buckets
from trainer.strategies.comm_hooks import register
from trainer.worker.gradient_buckets import buckets_of


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Twisted(nn.Module):
    """Used in another order than it is made, one layer twice and one never; a table with gradients by row, one
    frozen."""

    def __init__(self, never: bool = True) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(64, 512), nn.Linear(512, 256), nn.Linear(256, 64)
        self.never = nn.Linear(64, 64) if never else nn.Identity()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.table = nn.Embedding(100, 64, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(self.last(self.frozen(inputs))))
        rows = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        return self.last(hidden + self.table(rows))


def of_ddp(model: nn.Module, inputs: torch.Tensor, told: CollectiveStrategy) -> Buckets:
    """What DDP exchanges in its third backward."""
    ddp = DistributedDataParallel(
        model,
        broadcast_buffers=False,
        init_sync=False,
        bucket_cap_mb=told.bucket_cap_mb,
        static_graph=told.static_graph,
        find_unused_parameters=told.find_unused_parameters,
        gradient_as_bucket_view=told.gradient_as_bucket_view,
    )
    seen: list[int | None] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations as classes
        buffer = bucket.buffer()
        seen.append(None if buffer.is_sparse else buffer.nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        ddp(inputs).sum().backward()
    return Buckets([size for size in seen if size is not None], seen.count(None))


def resnet() -> nn.Module:
    return torchvision.models.resnet18()


def transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128)


IMAGES, FLAT = (2, 3, 32, 32), (2, 64)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "residual": (resnet, IMAGES, {"bucket_cap_mb": 5.0}),
    "one bucket": (resnet, IMAGES, {"bucket_cap_mb": 100.0}),
    "the default": (resnet, IMAGES, {}),
    "copies": (resnet, IMAGES, {"bucket_cap_mb": 5.0, "gradient_as_bucket_view": False}),
    "attention": (transformer, IMAGES, {"bucket_cap_mb": 0.05}),
    "twisted": (lambda: Twisted(never=False), FLAT, {"bucket_cap_mb": 0.1}),
    "unused are looked for": (Twisted, FLAT, {"bucket_cap_mb": 0.1, "find_unused_parameters": True}),
    "unused, residual": (resnet, IMAGES, {"bucket_cap_mb": 5.0, "find_unused_parameters": True}),
    "static": (Twisted, FLAT, {"bucket_cap_mb": 0.1, "static_graph": True}),
    "static, unused": (Twisted, FLAT, {"bucket_cap_mb": 0.1, "static_graph": True, "find_unused_parameters": True}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=[pytest.mark.long] * ((number % 2 == 0) == (dtype is None)))
        for number, case in enumerate(CASES)
        for dtype in (None, torch.float64)
    ],
)
def test_buckets_of_the_plan_are_ddps(case: str, dtype: torch.dtype | None) -> None:
    make, shape, keys = CASES[case]
    told = CollectiveStrategy(**keys)
    torch.manual_seed(0)
    real, inputs = make().to(dtype or torch.float32), torch.randn(shape, dtype=dtype)
    with torch.device("meta"):
        model = make()
    found = buckets_of(model, lambda: model(torch.zeros(shape, device="meta")), told, dtype)
    assert found == of_ddp(real, inputs, told)
    assert found is not None and sum(found.sizes) > 0


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd", "dgc"])
def test_hooks_of_the_exchange_change_no_bucket(hook: str) -> None:
    """torch's own statement of the buckets that it has made again."""
    told = CollectiveStrategy(bucket_cap_mb=0.05, comm_hook=hook)
    torch.manual_seed(0)
    model = transformer()
    ddp = DistributedDataParallel(
        copy.deepcopy(model), broadcast_buffers=False, init_sync=False, bucket_cap_mb=told.bucket_cap_mb
    )
    register(ddp, told, Updater(torch.optim.SGD(ddp.parameters(), lr=0.1), lambda step: 1.0))
    for _ in range(3):
        ddp(torch.randn(IMAGES)).sum().backward()
    truth = [int(size) for size in ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    found = buckets_of(model, lambda: model(torch.zeros(IMAGES)), told)
    assert found == Buckets(truth) and len(truth) > 2


def test_a_backward_that_cannot_be_tried_tells_of_no_buckets_and_leaves_no_gradient() -> None:
    model = nn.Linear(2, 2)
    assert buckets_of(model, lambda: RuntimeError("no such operation"), CollectiveStrategy()) is None
    assert buckets_of(model, lambda: model(torch.zeros(1, 2)).detach(), CollectiveStrategy()) is None
    assert buckets_of(model, lambda: model(torch.zeros(1, 2)), CollectiveStrategy()) == Buckets([24])
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_they_are_told_in_a_few_words() -> None:
    mib = 2**20
    assert exchanged(Buckets([mib, 26424115, 23173530]), "fp32") == "3 buckets: 1.0, 25.2, 22.1 MiB"
    assert exchanged(Buckets([250_000], 2), "bf16") == "1 bucket: 0.24 MiB; 2 tables by rows"
    assert exchanged(Buckets([], 1), "fp32") == "1 table by rows"
    assert exchanged(Buckets([mib] * 99), "bf16") == f"99 buckets: about {', '.join(['1.0'] * 11)}, ..., 1.0 MiB"
