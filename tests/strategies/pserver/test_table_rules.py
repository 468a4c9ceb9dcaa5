"""The rule of a server's table (Adam, ...) that begins in a later run counts its steps from there, as torch's optimizer
does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.strategies.pserver.harness import config as payload
from tests.strategies.pserver.states import whole
from trainer.config.schema.strategy import Entry
from trainer.optim.sparse import CLASSES
from trainer.planning.launcher import Assignment
from trainer.strategies.pserver.protocol.layout import Layout, TableSpec
from trainer.strategies.pserver.server.shard import Shard
from trainer.weights.server_files import ServerFile, TableFacts

IDS = np.arange(3)
LR = 0.1


def shard(rule: str) -> Shard:
    made = payload("sync", 2)
    made["config"]["optimizer"] = {"_target_": "torch.optim.SGD", "lr": LR, "sparse": rule}
    made["plan"]["batches"]["lr"], made["plan"]["topology"]["roles"]["server"] = LR, 1
    given = Assignment.of(made)
    layout = Layout("float64", [], [TableSpec(1, "table", 2, 3, "normal", 1.0)])
    return Shard(given.config, Entry(), given.plan, 0, layout, lambda n, dtype: torch.empty(n, dtype=dtype))


def gradient(step: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def push(made: Shard, *steps: int) -> torch.Tensor:
    """The table's values after updates with these gradients."""
    for step in steps:
        made.apply(None, {1: (IDS, gradient(step))}, 0)
    return made.tables[1].pull(IDS)


def saved(made: Shard, folder: Path) -> tuple[ServerFile, dict[str, Any]]:
    tensors, numbers = made.state()
    table = made.tables[1]
    facts = TableFacts(2, "float64", table.kernel.name, 3, 3, "normal", 1.0, 0)
    meta = {**numbers, "tables": {"table": asdict(facts)}}
    folder.mkdir()
    save_file(whole(tensors), folder / "server-0.safetensors", {"meta": json.dumps(meta)})
    found = ServerFile(0, folder / "server-0.safetensors")
    return found, found.meta


@pytest.mark.parametrize("rule", ["adam", "adagrad"])
def test_rule_that_begins_in_a_later_run_takes_the_steps_of_torchs(rule: str, tmp_path: Path) -> None:
    first = shard("sgd")
    table = torch.nn.Parameter(push(first, 0, 1, 2).clone())
    second, third = shard(rule), shard(rule)
    second.load([saved(first, tmp_path / "first")])
    torch_own = CLASSES[rule]([table], lr=LR)
    for step in (3, 4):
        table.grad = gradient(step).to_sparse(1)
        torch_own.step()
    torch.testing.assert_close(push(second, 3, 4), table.detach(), rtol=0, atol=1e-12)
    again = saved(second, tmp_path / "second")
    assert again[0].steps("table") == 2
    third.load([again])
    table.grad = gradient(5).to_sparse(1)
    torch_own.step()
    torch.testing.assert_close(push(third, 5), table.detach(), rtol=0, atol=1e-12)
