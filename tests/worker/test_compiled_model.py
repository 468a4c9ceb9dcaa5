"""compile: repeated blocks are compiled once, auto says why not, and compiling is shown and not counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torchvision.models import resnet18, vit_b_16

from trainer.config.run_config import RunConfig
from trainer.config.schema import ShardedStrategy
from trainer.errors import UserError
from trainer.host import hardware
from trainer.planning import compiling as planning
from trainer.planning.chosen import Compiling
from trainer.planning.compiling import CompileCase, compiling
from trainer.run_folder.report import Report
from trainer.worker.compiled_model import compile_model, repeated_blocks, share_in_blocks, shown

CASE = CompileCase("cuda", 25_000_000, 0, 0.9, False, (9, 0), 10_000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x)).sum(1)


def graphs(depth: int, regions: bool) -> tuple[int, list[torch.Tensor]]:
    """How many graphs are compiled for a model, and its gradients."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Stack(depth)
    compile_model(model, Compiling(True, "default", regions), "aot_eager")
    model(torch.ones(3, 4)).sum().backward()
    assert [*model.state_dict()] == [*Stack(depth).state_dict()], "names stay"
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], [
        p.grad for p in model.parameters() if p.grad is not None
    ]


@pytest.mark.all
def test_a_kind_of_block_is_compiled_once() -> None:
    torch.manual_seed(0)
    eager = Stack(6)
    eager(torch.ones(3, 4)).sum().backward()
    for regions in (True, False):
        count, gradients = graphs(6, regions)
        assert count == 1
        assert all(torch.equal(one, p.grad) for one, p in zip(gradients, eager.parameters(), strict=True))  # type: ignore[arg-type]


def test_repeated_blocks_are_the_outermost_of_a_kind() -> None:
    with torch.device("meta"):
        vit, resnet = vit_b_16(), resnet18()
    assert {type(block).__name__ for block in repeated_blocks(vit)} == {"EncoderBlock"} and len(
        repeated_blocks(vit)
    ) == 12
    assert share_in_blocks(vit) > 0.95 and share_in_blocks(resnet) < 0.5
    assert repeated_blocks(Stack(2)) == [] and len(repeated_blocks(Stack(3))) == 3


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(CASE, device="cpu"), "on a CPU it pays for some models only"),
        (replace(CASE, parameters=60_000), "with 60,000 parameters"),
        (replace(CASE, updates=999), "999 updates are too few"),
        (replace(CASE, capability=(6, 1)), "compute capability 7.0"),
        (replace(CASE, servers=True), "rows of tables"),
    ],
)
def test_auto_says_why_it_does_not_compile(case: CompileCase, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "lacks_for_kernels", lambda device: "")
    chosen, why = compiling(RunConfig(compile="auto"), case)
    assert chosen == Compiling() and reason in why["compile"]


@pytest.mark.parametrize(
    "config", [{"strategy": ShardedStrategy()}, {"recompute": "auto"}], ids=["sharded", "recomputed"]
)
def test_auto_compiles_nothing_beside_what_compile_true_is_refused_with(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "lacks_for_kernels", lambda device: "")
    assert compiling(RunConfig(compile="auto", **config), CASE)[0] == Compiling()
    whole_model = RunConfig(compile="auto", strategy=ShardedStrategy(shard="optimizer"))
    assert compiling(whole_model, CASE)[0].compile


def test_auto_compiles_what_is_large_and_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "lacks_for_kernels", lambda device: "")
    assert compiling(RunConfig(compile="auto"), CASE)[0] == Compiling(True, "default", True)
    chosen, why = compiling(RunConfig(compile="auto"), replace(CASE, in_blocks=0.3))
    assert not chosen.regions and why["compile_regions"] == "only 30% of the parameters are in blocks that come again"
    assert compiling(RunConfig(), CASE) == (Compiling(), {})


def test_triton_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "c_compiler", lambda: None)
    assert "no C compiler" in compiling(RunConfig(compile="auto"), CASE)[1]["compile"]


@pytest.mark.parametrize(
    ("execution", "case", "why"),
    [
        ({"compile_mode": "reduce-overhead"}, {"ddp": True, "batch_norm": True}, "compile_mode=default"),
        ({"compile_mode": "max-autotune"}, {"ddp": True, "batch_norm": True}, "max-autotune-no-cudagraphs"),
        ({"compile_mode": "reduce-overhead"}, {"device": "cpu"}, "this run trains on CPUs"),
        ({"compile_mode": "max-autotune", "compile_backend": "eager"}, {}, "writes no kernels"),
    ],
)
def test_modes_that_cannot_be_are_refused(execution: dict[str, Any], case: dict[str, Any], why: str) -> None:
    config = RunConfig(compile=True).changed(execution=execution)
    with pytest.raises(UserError, match=why):
        compiling(config, replace(CASE, **case))
    if execution.get("compile_backend") is None and "ddp" in case:
        assert compiling(config, replace(CASE, ddp=False, batch_norm=True))[0].compile


def test_compiling_is_shown_and_not_counted(tmp_path: Path) -> None:
    torch._dynamo.reset()
    (tmp_path / "metrics.jsonl").touch()
    report, now, seen = Report(tmp_path, 10), [0.0], list[str]()
    report.doing = seen.append  # type: ignore[method-assign]
    model = Stack(3)
    compile_model(model, Compiling(True), "eager")

    def clock() -> float:
        now[0] += 20.0
        return now[0]

    with shown(report, clock):
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
        model(torch.ones(2, 4, dtype=torch.float64).float().requires_grad_())
    assert seen == [
        "first update, compiling part 1 of the model",
        "first update, compiling part 2 of the model, 20 s so far",
    ]
    assert report.elsewhere == 40.0
    model(torch.ones(7, 9, 4))
    assert len(seen) == 2, "only within"
    report.close()
