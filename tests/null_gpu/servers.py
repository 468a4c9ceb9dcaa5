"""``python -m tests.null_gpu.servers DEPTH``: what a worker on a GPU exchanges with two parameter servers.

The answer has the waits and the kernels of each step, without the servers: what they answer is zeros. ``look up`` is
that of a table's ids, of the batch that is computed and of the next one.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tests.null_gpu import fakes
from tests.null_gpu.count import Phases
from tests.null_gpu.machine import leave
from tests.null_gpu.stack import Stack
from tests.null_gpu.waits import Waits
from trainer.strategies.pserver.worker import ahead as ahead_module
from trainer.strategies.pserver.worker.agreement import agree_on
from trainer.strategies.pserver.worker.ahead import Ahead
from trainer.strategies.pserver.worker.clipping import clip_factor, clip_values
from trainer.strategies.pserver.worker.remote_model import DenseMap

SERVERS = 2


def exchanged(depth: int) -> dict[str, Any]:
    """Waits and kernels of the parts of an update."""
    waits = Waits()
    phases = Phases(waits)
    with fakes.in_place(1, waits), FakeTensorMode(allow_non_fake_inputs=True), waits:
        model = Stack(4, depth).to("cuda")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        dense = DenseMap(list(model.named_parameters()), SERVERS, "round_robin", None)
        with phases.phase("clip"):
            clip_values(model.parameters(), {}, 1.0)
            factor = clip_factor(model.parameters(), {}, 1.0)
        for server in range(SERVERS):
            answer = torch.zeros(dense.size(server))
            with phases.phase("push"):
                dense.gradients(server, factor / 2)
            with phases.phase("pull"):
                dense.write(server, answer)
        with patch.object(ahead_module, "unique", fakes.on_host(ahead_module.unique)):
            looked_up(phases)
        with phases.phase("buffers"):
            agree_on(list(model.buffers()), lambda values: values, True, True)
    return {
        name: {
            "waits": sum(times for (phase, _, _), times in waits.found.items() if phase == name),
            "kernels": sum(times for (phase, _), times in waits.kernels.items() if phase == name),
        }
        for name in phases.times
    }


def looked_up(phases: Phases) -> None:
    """The ids of a batch on the GPU, which the host has read."""
    table: Any = SimpleNamespace(number=1, name="table")
    ahead = Ahead([table])
    with _disable_current_modes():
        here = [{"ids": torch.tensor([[3, 5], [3, number]])} for number in (7, 8)]
    now, coming = ({"ids": one["ids"].to("cuda", non_blocking=True)} for one in here)
    with phases.phase("look up"):
        ahead.computing(now, here[0])
        ahead.learn_path(table, now["ids"])
        once, places = ahead.unique(table, now["ids"])
        assert once.tolist() == [3, 5, 7] and places.device.type == "cuda"
        ahead.expect(coming, here[1])
        _, once, places = (ahead.coming() or {})[1]
        assert once.tolist() == [3, 5, 8] and places.device.type == "cuda"


if __name__ == "__main__":
    leave(exchanged(json.loads(sys.argv[1])))
